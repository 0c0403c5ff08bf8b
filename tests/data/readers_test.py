"""Questions from files, and errors that name file and line."""

import dataclasses
import gzip
import json

import pyarrow
from pyarrow import parquet
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
  # Equal ids in different sets are different questions, and the text of the
  # answer key is golden.
  other = _OPEN | {'dataset': 'other'}
  rows = [_OPEN, ' ', other, _CHOICE | {'answers': ['2']}]
  one, two, three = readers.read_questions(_write(tmp_path, *rows))
  assert one == types.Question(
    'n1', 'who?', ('x', 'y'), 'nq', gold_passages=('p',), hops=2
  )
  assert two == dataclasses.replace(one, data_set='other')
  assert three == types.Question(
    'm1', 'which?', ('2', 'two'), 'medmcqa', 'choice', _CHOICE['options']
  )


def _without(fields, name):
  return {key: value for key, value in fields.items() if key != name}


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('{"id"', 'delimiter'),
    ('[' * 100000, 'recursion'),
    ('[]', 'object'),
    (_CHOICE | {'id': True}, '"id"'),
    (_without(_CHOICE, 'answers'), '"answers"'),
    (_without(_CHOICE, 'options'), '"options"'),
    (_CHOICE | {'question': ' '}, '"question"'),
    (_CHOICE | {'dataset': 3}, '"dataset"'),
    (_CHOICE | {'kind': 'choice'}, "'choice'; choices: open, mcq"),
    (_CHOICE | {'answers': 'two'}, '"answers"'),
    (_CHOICE | {'options': {'A': 1}}, '"options"'),
    (_CHOICE | {'answer_key': 'C'}, "'C'"),
    (_without(_CHOICE, 'answer_key') | {'answers': ['six']}, '"answers"'),
    (_OPEN, "duplicate id 'n1', first at "),
    (_OPEN | {'id': '2', 'gold_pids': 'p'}, '"gold_pids"'),
    (_OPEN | {'id': '2', 'hops': -1}, '"hops"'),
    ({'question': 'q', 'reward_model': {}}, '"ground_truth"'),
  ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
  path = _write(tmp_path, _OPEN, line)
  with pytest.raises(ValueError) as error:
    readers.read_questions(path)
  assert str(error.value).startswith(f'{path}:2: ')
  assert message in str(error.value) and '\n' not in str(error.value)


def test_a_question_and_its_answers_suffice(tmp_path):
  fields = {'question': 'which?', 'answers': ['two']}
  options = _CHOICE['options']
  path = _write(tmp_path, fields, fields, fields | {'options': options})
  same = ('which?', ('two',), 'questions')
  assert readers.read_questions(path) == [
    types.Question('1', *same),
    types.Question('2', *same),
    types.Question('3', *same, 'choice', options),
  ]


def test_a_line_that_is_too_long_is_named_before_it_fills_the_memory(tmp_path):
  packed = gzip.compress(b'a' * (1 << 20)) * 33  # 33 MiB without a line break
  for name in ('questions.jsonl.gz', 'questions.csv.gz'):
    path = tmp_path / name
    path.write_bytes(gzip.compress(b'\n') + packed)
    with pytest.raises(ValueError) as error:
      readers.read_questions(path)
    assert str(error.value).startswith(f'{path}:2: longer than 33554432 char')


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


_SEARCH_R1 = {
  'id': 'train_0',
  'question': 'total number of death row inmates in the us?',
  'golden_answers': ['2,718'],
  'data_source': 'nq',
  'prompt': [{'role': 'user', 'content': 'Question: total number?\n'}],
  'reward_model': {'style': 'rule', 'ground_truth': {'target': ['2,718']}},
  'extra_info': {'index': 0, 'split': 'train'},
}
_VERL = {
  'data_source': 'searchR1_hotpotqa',
  'prompt': [
    {'role': 'system', 'content': 'You are helpful.'},
    {'role': 'user', 'content': 'Answer it. Question: which lake?\n'},
  ],
  'reward_model': {'style': 'rule', 'ground_truth': {'target': ['a', 'b']}},
  'extra_info': {
    'index': 7,
    'split': 'train',
    'question': 'which lake is it?',
    'tools_kwargs': {'search': {'create_kwargs': {'question': 'which?'}}},
  },
  'metadata': None,
}
_FLASHRAG = {
  'id': 'test_3',
  'question': 'what?',
  'golden_answers': ['it'],
  'metadata': {'supporting_facts': {'title': ['It'], 'sent_id': [0]}},
}


@pytest.mark.parametrize(
  ('row', 'expected'),
  [
    (_SEARCH_R1, ('train_0', _SEARCH_R1['question'], 'nq')),
    (_VERL, ('train_7', 'which lake is it?', 'hotpotqa')),
    # Without a field for the question, it is read from the prompt.
    (
      _VERL | {'extra_info': {'index': 7, 'split': 'test'}},
      ('test_7', 'which lake?', 'hotpotqa'),
    ),
    (_FLASHRAG, ('test_3', 'what?', 'rows')),
  ],
)
@pytest.mark.parametrize('suffix', ['parquet', 'jsonl'])
def test_rows_of_others_are_read_from_both_kinds_of_files(
  row, expected, suffix, tmp_path
):
  path = tmp_path / f'rows.{suffix}'
  if suffix == 'parquet':
    parquet.write_table(pyarrow.Table.from_pylist([row]), path)
  else:
    path.write_text(json.dumps(row))
  (question,) = readers.read_questions(path)
  assert (question.id, question.text, question.data_set) == expected
  target = row.get('golden_answers') or ['a', 'b']
  assert question.golden_answers == tuple(target)


def test_columns_of_pandas_are_read(tmp_path):
  """Arrays arrive as lists, missing numbers turn numbers into floats."""
  rows = [_OPEN, _without(_OPEN, 'hops') | {'id': 'n2'}, _CHOICE]
  rows[2] = rows[2] | {'options': _CHOICE['options'] | {'E': None}}
  rows[0] = _OPEN | {'options': None, 'answer_key': None}  # for the columns
  table = pyarrow.Table.from_pylist([*rows, _CHOICE | {'id': 'm2'}])
  hops = pyarrow.array([2.0, None, None, None], pyarrow.float64())
  names = table.column_names
  table = table.set_column(names.index('hops'), 'hops', hops)
  parquet.write_table(table, tmp_path / 'rows.parquet', row_group_size=2)
  plain = _write(tmp_path, _OPEN, rows[1], _CHOICE, _CHOICE | {'id': 'm2'})
  found = readers.read_questions(tmp_path / 'rows.parquet')
  assert found == readers.read_questions(plain)


def test_malformed_rows_and_files_of_parquet_are_named(tmp_path):
  path = tmp_path / 'rows.parquet'
  rows = [_FLASHRAG, _FLASHRAG | {'id': 'test_4', 'golden_answers': []}]
  parquet.write_table(pyarrow.Table.from_pylist(rows), path)
  with pytest.raises(ValueError) as error:
    readers.read_questions(path)
  assert str(error.value).startswith(f'{path}: row 2: "answers": ')
  rows[1] = _FLASHRAG
  parquet.write_table(pyarrow.Table.from_pylist(rows), path)
  with pytest.raises(ValueError, match="row 2: .*'test_3', first at .*row 1"):
    readers.read_questions(path)
  path.write_bytes(path.read_bytes()[:-9])
  with pytest.raises(ValueError, match=r'rows\.parquet: '):
    readers.read_questions(path)
