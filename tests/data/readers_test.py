"""Questions from files, and errors that name file and line."""

import gzip
import json

import pytest

from stppo_jax import types
from stppo_jax.data import readers

_OPEN = {
  'id': 'n1',
  'dataset': 'nq',
  'kind': 'open',
  'question': 'who?',
  'answers': ['x', 'y'],
  'gold_pids': ['p'],
  'hops': 2,
}
_CHOICE = {
  'id': 'm1',
  'dataset': 'medmcqa',
  'kind': 'mcq',
  'question': 'which?',
  'answers': ['two'],
  'options': {'A': 'one', 'B': 'two'},
  'answer_key': 'B',
}


def _write(tmp_path, *rows):
  path = tmp_path / 'questions.jsonl'
  path.write_text(
    '\n'.join(row if isinstance(row, str) else json.dumps(row) for row in rows)
  )
  return path


def test_open_and_choice_questions_are_read(tmp_path):
  assert readers.read_questions(_write(tmp_path, _OPEN, ' ', _CHOICE)) == [
    types.Question('n1', 'who?', ('x', 'y'), 'nq'),
    types.Question(
      'm1',
      'which?',
      ('two',),
      'medmcqa',
      'choice',
      {'A': 'one', 'B': 'two'},
    ),
  ]


def test_the_text_of_the_answer_key_is_golden():
  question = readers.parse_question(_CHOICE | {'answers': ['2']})
  assert question.golden_answers == ('2', 'two')


def test_equal_ids_in_different_sets_are_different_questions(tmp_path):
  path = _write(tmp_path, _OPEN, _OPEN | {'dataset': 'other'})
  assert len(readers.read_questions(path)) == 2


def _without(fields, name):
  return {key: value for key, value in fields.items() if key != name}


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('{"id"', 'delimiter'),
    ('[' * 100000, 'recursion'),
    ('[]', 'expected an object'),
    (_CHOICE | {'id': True}, '"id": expected a string'),
    (_without(_CHOICE, 'answers'), 'no "answers"'),
    (_without(_CHOICE, 'options'), 'no "options"'),
    (_CHOICE | {'question': ' '}, '"question": expected a string'),
    (_CHOICE | {'dataset': 3}, '"dataset": expected a string'),
    (_CHOICE | {'kind': 'choice'}, "'choice'; choices: open, mcq"),
    (_CHOICE | {'answers': []}, '"answers": expected a list'),
    (_CHOICE | {'answers': 'two'}, '"answers": expected a list'),
    (_CHOICE | {'options': {}}, '"options": expected an object'),
    (_CHOICE | {'options': {'A': 1}}, '"options": expected an object'),
    (_CHOICE | {'answer_key': 'C'}, "'C' is not among the options"),
    (
      _without(_CHOICE, 'answer_key') | {'answers': ['six']},
      'none is an option',
    ),
    (_OPEN, "duplicate id 'n1', first on line 1"),
  ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
  path = _write(tmp_path, _OPEN, line)
  with pytest.raises(ValueError) as error:
    readers.read_questions(path)
  assert str(error.value).startswith(f'{path}:2: ')
  assert message in str(error.value) and '\n' not in str(error.value)


def test_missing_empty_and_binary_files_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='absent: no such file'):
    readers.read_questions(tmp_path / 'absent')
  with pytest.raises(ValueError, match='no questions'):
    readers.read_questions(_write(tmp_path, ''))
  (tmp_path / 'binary').write_bytes(b'\xff\xfe')
  with pytest.raises(ValueError, match='not UTF-8'):
    readers.read_questions(tmp_path / 'binary')


def test_lines_of_search_r1_are_read_as_they_are(tmp_path):
  path = _write(
    tmp_path,
    {'id': 'train_0', 'question': 'who?', 'golden_answers': ['x', 'y']},
    {
      'id': 7,
      'question': 'where?',
      'golden_answers': ['z'],
      'data_source': 'nq',
      'ability': 'fact-reasoning',
      'reward_model': {'style': 'rule', 'ground_truth': {'target': ['z']}},
    },
  )
  assert readers.read_questions(path) == [
    types.Question('train_0', 'who?', ('x', 'y'), 'questions'),
    types.Question('7', 'where?', ('z',), 'nq'),
  ]


def test_a_question_and_its_answers_suffice(tmp_path):
  fields = {'question': 'which?', 'answers': ['two']}
  options = {'options': _CHOICE['options']}
  path = _write(tmp_path, fields, fields, fields | options)
  assert readers.read_questions(path) == [
    types.Question('1', 'which?', ('two',), 'questions'),
    types.Question('2', 'which?', ('two',), 'questions'),
    types.Question(
      '3', 'which?', ('two',), 'questions', 'choice', _CHOICE['options']
    ),
  ]


def test_compressed_files_are_read_and_damaged_ones_named(tmp_path):
  plain = _write(tmp_path, _OPEN, _CHOICE)
  path = tmp_path / 'questions.jsonl.gz'
  data = gzip.compress(plain.read_bytes())
  path.write_bytes(data)
  assert readers.read_questions(path) == readers.read_questions(plain)
  path.write_bytes(gzip.compress(b'\n{}\n'))
  with pytest.raises(ValueError, match=r'questions\.jsonl\.gz:2: no "'):
    readers.read_questions(path)
  for damaged in (data[:-9], plain.read_bytes(), data[:12] + b'?' + data[13:]):
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r'\.gz: not a complete gzip file: '):
      readers.read_questions(path)


def test_answers_of_which_nothing_is_left_are_noted_with_their_line(tmp_path):
  rows = [
    _OPEN,
    _OPEN | {'id': '2', 'answers': ['x', 'The']},
    _OPEN | {'id': '3', 'answers': ['', '?!']},
    _CHOICE | {'answers': ['the', 'two']},
  ]
  path, notes = _write(tmp_path, *rows), []
  assert len(readers.read_questions(path, note=notes.append)) == 4
  for note, (line, answer) in zip(
    notes, [(2, "'The'"), (3, "''"), (3, "'?!'")], strict=True
  ):
    start = f'{path}:{line}: nothing is left of the answer {answer} '
    assert note.startswith(start)
