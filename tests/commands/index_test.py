"""`index`, then `serve`, searched over HTTP and scored; and their refusals."""

import json
import random
import shutil

import pytest

from stppo_jax import __main__
from stppo_jax.data import passages as passages_lib
from tests.commands import serving
from tests.retrieval import encoders
from tests.retrieval import real_data
from tests.training import runs

_SHIPPED = real_data.SHIPPED / 'corpus.jsonl'


def _index(path, out, *flags):
  return __main__.main(['index', f'--corpus={path}', f'--out={out}', *flags])


def _recall(capsys, tmp_path, path, rows):
  """Returns the recall in the top 3 of an index that is built and served."""
  assert _index(path, tmp_path / 'index') == 0
  capsys.readouterr()
  queries = [row['question'] for row in rows]
  body = {'queries': queries, 'topk': 3}
  flags = [f'--index={tmp_path / "index"}', f'--corpus={path}']
  _, reply = serving.run(
    capsys, flags, lambda url: serving.post(f'{url}/retrieve', body)
  )
  lists = [[p['id'] for p in passages] for passages in reply['result']]
  return real_data.recall(lists, rows)


def test_a_corpus_is_indexed_served_searched_and_scored(capsys, tmp_path):
  rows = real_data.questions(real_data.SHIPPED / 'questions.jsonl')
  assert _recall(capsys, tmp_path, _SHIPPED, rows) == 1.0


_SLOW = pytest.mark.slow
_MULTIHOP = 'multihop/multihop'


@pytest.mark.parametrize(
  ('name', 'passages', 'expected'),
  [
    ('general/xquad_en', 'general/xquad_en', 0.976),
    pytest.param('general/nq_train', 'general/nq_train', 0.862, marks=_SLOW),
    pytest.param('multihop/hotpot_ircot500', _MULTIHOP, 0.885, marks=_SLOW),
    pytest.param('multihop/hotpot_train100', _MULTIHOP, 0.880, marks=_SLOW),
    pytest.param('multihop/2wiki_train500', _MULTIHOP, 0.988, marks=_SLOW),
    pytest.param('multihop/musique_train100', _MULTIHOP, 0.820, marks=_SLOW),
  ],
)
def test_recall_on_real_data(capsys, tmp_path, name, passages, expected):
  """The figures of the folder's README, of at most 500 questions."""
  if not real_data.FOLDER.is_dir():
    pytest.skip('the folder of real data is absent')
  rows = real_data.questions(real_data.FOLDER / f'{name}.questions.jsonl')
  rows = random.Random(0).sample(rows, min(len(rows), 500))
  path = real_data.FOLDER / f'{passages}.corpus.jsonl'
  found = _recall(capsys, tmp_path, path, rows)
  assert found == pytest.approx(expected, abs=0.01)


@pytest.mark.slow
def test_two_build_one_index_one_after_the_other(tmp_path):
  words = [f'w{n % 997}' for n in range(50)]
  lines = [{'id': str(n), 'contents': f'"{n}"\n{words}'} for n in range(20_000)]
  path = tmp_path / 'corpus.jsonl'
  path.write_text('\n'.join(map(json.dumps, lines)))
  flags = [f'--corpus={path}', f'--out={tmp_path}/index']
  both = [runs.start('index', *flags) for _ in range(2)]
  outs, errs = zip(*(process.communicate(timeout=120) for process in both))
  assert [process.returncode for process in both] == [0, 0], errs
  ends = {out.split('bm25 ')[1].strip() for out in outs}
  assert ends == {'built', 'was there already'}
  waits = f'{tmp_path}/index: another process builds an index there; waiting'
  assert sum(err.startswith(waits) for err in errs) == 1


@pytest.fixture(scope='module')
def indexed(tmp_path_factory):
  """Returns a folder with an encoder and an index of its vectors."""
  folder = tmp_path_factory.mktemp('dense')
  encoder = f'--encoder={encoders.write(folder / "model")}'
  flags = ['--backend=dense', encoder, '--dtype=bfloat16', '--query_prefix=']
  assert _index(_SHIPPED, folder / 'index', *flags) == 0
  return folder


@pytest.fixture
def flags(indexed, tmp_path):
  """Returns the flags of a copy."""
  shutil.copytree(indexed, tmp_path, dirs_exist_ok=True)
  return [f'--index={tmp_path}/index', f'--encoder={tmp_path}/model']


@pytest.mark.parametrize(
  'backend', [pytest.param('dense', marks=pytest.mark.slow), 'hybrid']
)
def test_dense_search_is_indexed_and_served(capsys, tmp_path, flags, backend):
  """The weights are random, so a passage finds itself and little more."""
  passages = passages_lib.read_corpus(_SHIPPED)
  assert _index(_SHIPPED, tmp_path / 'index') == 0
  capsys.readouterr()
  queries = [f'{p.title}\n{p.text}' for p in passages[:8]]
  body = {'queries': queries, 'topk': 3}
  _, reply = serving.run(
    capsys,
    [*flags, f'--backend={backend}'],
    lambda url: serving.post(f'{url}/retrieve', body),
  )
  found = [[p['id'] for p in ps] for ps in reply['result']]
  assert [ids[0] for ids in found] == [p.id for p in passages[:8]]
  assert all(len(ids) == 3 for ids in found)


def test_another_encoder_is_refused(refused, tmp_path, flags):
  encoders.write(tmp_path / 'model', seed=1)
  line = refused('serve', *flags, '--backend=dense')
  assert 'made by another encoder than' in line
  line = refused('serve', *flags, '--backend=bm25')
  assert 'no bm25 index; the folder has: dense' in line
