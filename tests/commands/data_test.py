"""The command `data`: built from files and from a server, listed and shown."""

import pytest
import tensorflow_datasets as tfds

from stppo_jax import __main__
from stppo_jax.data import catalogue
from stppo_jax.data import passages as passages_lib
from stppo_jax.data import tfds_store
from tests.data import public_files

_SIZES = {
  name: {'train': 24, 'validation': 24}
  for name in 'nq qed triviaqa hotpotqa 2wikimultihopqa musique medmcqa'.split()
} | {
  'popqa': {'test': 24},
  'bamboogle': {'test': 9},
  'medqa': {'train': 24, 'test': 24},
  'pubmedqa': {'train': 12, 'test': 12},
  'mmlu-med': {'validation': 24, 'test': 24},
}


@pytest.fixture(scope='module')
def originals(tmp_path_factory):
  """Returns the folder of each data set, as its authors publish it."""
  return public_files.write(tmp_path_factory.mktemp('originals'))


@pytest.fixture(scope='module')
def root(tmp_path_factory, originals):
  """Returns a folder in which every data set was built."""
  root = tmp_path_factory.mktemp('built')
  for name, folder in originals.items():
    assert _data('build', name, root, f'--from_files={folder}') == 0
  return root


@pytest.fixture
def server(originals):
  """Returns the address of a server of all originals, one folder each."""
  with public_files.served(originals['nq'].parent) as address:
    yield address


def _data(command, name, root, *flags):
  return __main__.main(['data', command, name, f'--root={root}', *flags])


def _questions(root, name, split):
  return tfds_store.open_split(root, name, [split])


def test_every_published_set_is_built_from_its_originals(root):
  assert set(_SIZES) == set(catalogue.PUBLISHED)
  for name, sizes in _SIZES.items():
    summary = tfds_store.summary(root, name)
    assert summary.sizes == sizes, name
    for split in sizes:
      questions = _questions(root, name, split)
      assert {question.data_set for question in questions} == {name}
      # The recorded checksum is that of what is read.
      assert tfds_store.checksum(questions) == summary.checksums[split]


@pytest.mark.parametrize(
  ('place', 'identity', 'text', 'answers'),
  [
    (
      *('nq:validation:2', 'validation_3', 'how deep is lake 502'),
      ('502 metres', '502'),
    ),
    (
      *('qed:validation:4', '504', 'how deep is lake 504'),
      ('504 metres', '504, metres deep'),
    ),
    (
      *('triviaqa:train:1', 'qf_101', 'Which lake is 101 metres deep?'),
      ('Lake 101', 'The Lake 101'),
    ),
    (
      *('popqa:test:0', '4222362', "What is Poet 0's occupation?"),
      ('poet', 'writer'),
    ),
    (
      *('bamboogle:test:8', 'test_10', 'Who, then, was king after king 8?'),
      ('King 8',),
    ),
    ('medqa:test:2', 'test_3', 'Case 502: which organ?', ('lung',)),
    ('medmcqa:train:3', '1ab-103', 'Case 103: which organ?', ('skin',)),
    ('pubmedqa:test:1', '21645376', 'Does drug 2 help?', ('maybe',)),
    (
      *('mmlu-med:test:5', 'clinical_knowledge_test_2'),
      *('clinical_knowledge 1, which?', ('liver',)),
    ),
  ],
)
def test_rows_are_read_as_their_authors_mean_them(
  root, place, identity, text, answers
):
  name, split, index = place.split(':')
  question = _questions(root, name, split)[int(index)]
  assert (question.id, question.text) == (identity, text)
  assert question.golden_answers == answers
  if name in ('medqa', 'medmcqa', 'pubmedqa', 'mmlu-med'):
    assert question.kind == 'choice'
    assert set(question.golden_answers) < set(question.options.values())


def test_paragraphs_become_a_corpus_and_gold_passages(root):
  for name in ('hotpotqa', '2wikimultihopqa', 'musique'):
    corpus = passages_lib.read_corpus(root / f'{name}.corpus.jsonl')
    titles = {passage.id: passage.title for passage in corpus}
    # Two of 48 questions each, and a third one that all of them share.
    assert len(corpus) == 2 * 48 + 1
    question = _questions(root, name, 'validation')[0]
    gold = [titles[pid] for pid in question.gold_passages]
    assert gold == ['River 500', 'Lake 500'] and question.hops == 2
  texts = {passage.text for passage in corpus}
  assert 'River 500 flows into Lake 500.  It is long.' in texts
  passages = passages_lib.read_corpus(root / 'pubmedqa.corpus.jsonl')
  assert passages[1].title == 'PMID 21645374 RESULTS'
  assert not (root / 'nq.corpus.jsonl').exists()


def test_any_program_reads_what_was_built_in_any_order(root):
  folder = root / 'search_questions' / 'medqa' / '1.0.0'
  source = tfds.builder_from_directory(folder).as_data_source('train')
  assert source[1]['question'] == b'Case 101: which organ?'
  assert source[1]['options']['letter'] == [b'A', b'B', b'C', b'D']
  questions = _questions(root, 'hotpotqa', 'train')
  forwards = [questions[index] for index in range(24)]
  assert [questions[index] for index in range(23, -1, -1)] == forwards[::-1]
  assert len({question.id for question in forwards}) == 24
  assert questions[3:6] == forwards[3:6]


def test_a_set_that_is_built_again_has_the_same_checksum(
  tmp_path, root, originals, capsys
):
  flag = f'--from_files={originals["musique"]}'
  assert _data('build', 'musique', tmp_path, flag) == 0
  first = tfds_store.summary(tmp_path, 'musique')
  assert first == tfds_store.summary(root, 'musique')
  assert _data('build', 'musique', tmp_path, flag) == 2
  assert '--force builds it anew' in capsys.readouterr().err
  assert _data('build', 'musique', tmp_path, flag, '--force') == 0
  assert tfds_store.summary(tmp_path, 'musique') == first
  # Another row is another checksum.
  rows = (originals['musique'] / 'musique_ans_v1.0_dev.jsonl').read_text()
  path = tmp_path / 'dev.jsonl'
  path.write_text(rows.replace('river 503', 'river 504'))
  flag = f'--from_files=validation:{path}'
  assert _data('build', 'musique', tmp_path, flag, '--force') == 0
  other = tfds_store.summary(tmp_path, 'musique')
  assert other.sizes == {'validation': 24}
  assert other.checksums['validation'] != first.checksums['validation']
  left = {path.name for path in tmp_path.iterdir()}
  assert left == {'dev.jsonl', 'musique.corpus.jsonl', 'search_questions'}


@pytest.mark.parametrize(
  'name',
  [
    'nq',
    pytest.param('triviaqa', marks=pytest.mark.slow),
    'pubmedqa',
    pytest.param('mmlu-med', marks=pytest.mark.slow),
  ],
)
def test_originals_are_fetched_from_a_server(name, tmp_path, root, server):
  flag = f'--mirror={server}/{name}/'
  assert _data('build', name, tmp_path, flag) == 0
  assert tfds_store.summary(tmp_path, name) == tfds_store.summary(root, name)
  # What is there already is not fetched again.
  flags = ['--mirror=http://127.0.0.1:1', '--force']
  assert _data('build', name, tmp_path, *flags) == 0


def test_a_set_that_cannot_be_fetched_says_which_files_it_needs(
  tmp_path, server, capsys
):
  assert _data('build', 'nq', tmp_path, f'--mirror={server}/away') == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert f'nq: cannot fetch {server}/away/NQ-open.train.jsonl: ' in line
  assert '404' in line and 'NQ-open.dev.jsonl from https://' in line
  (tmp_path / 'empty').mkdir()
  flag = f'--from_files={tmp_path}/empty'
  assert _data('build', 'hotpotqa', tmp_path, flag) == 2
  assert 'hotpotqa: files are missing in ' in capsys.readouterr().err
  assert not (tmp_path / 'search_questions').exists()


@pytest.mark.parametrize(
  ('name', 'file', 'text', 'message'),
  [
    ('nq:train', 'NQ-open.train.jsonl', '{"question": "q"}', '1: no "answer"'),
    ('nq:train', 'NQ-open.train.jsonl', '{"question",', '1: '),
    (
      *('medqa:train', 'phrases_no_exclude_train.jsonl'),
      '{"question": "q", "options": {"A": "x"}, "answer_idx": "E"}',
      "1: the answer 'E'",
    ),
    ('popqa:test', 'popQA.tsv', 'id\tsubj\n1', '2: expected 2 columns'),
  ],
)
def test_a_malformed_row_is_named(name, file, text, message, tmp_path, refused):
  path, root = tmp_path / file, tmp_path / 'new' / 'root'
  path.write_text(f'{text}\n')
  name, _, split = name.partition(':')
  words = ['data', 'build', name, f'--root={root}']
  line = refused(*words, f'--from_files={split}:{path}')
  assert line.startswith(f'{path}:{message}') and not root.parent.exists()


def test_list_and_show_print_what_a_person_reads(root, capsys):
  assert __main__.main(['data', 'list', f'--root={root}']) == 0
  page = capsys.readouterr().out
  assert 'validation: 24 questions, sha256 ' in page
  assert 'MedMCQA; MIT; https://github.com/medmcqa' in page
  assert _data('show', 'medqa:test', root, '--start=23') == 0
  assert capsys.readouterr().out == (
    'medqa:test: 24 questions\n'
    '\n[23] medqa test_24\nCase 523: which organ?\n'
    '  A. aorta\n  B. liver\n  C. lung\n  D. skin\n= skin\n'
  )
  assert _data('show', 'hotpotqa:validation', root, '--rows=1') == 0
  page = capsys.readouterr().out
  assert 'hops: 2\ngold passages: hotpotqa-' in page
  path = root / 'mine.jsonl'
  path.write_text('{"question": "a\\u001b[2Jb", "answers": ["x"]}\n')
  assert __main__.main(['data', 'show', str(path)]) == 0
  assert '[0] mine 1\na\\x1b[2Jb\n= x\n' in capsys.readouterr().out
