"""Demonstrations from questions and passages of one's own, as a user sees them.

Two golden passages lead from the lake to its city and its region. The third one
has a title that cannot be guessed.
"""

import collections
import json

import pytest

from stppo_jax import __main__

_PASSAGES = [
  {'id': 'p1', 'title': 'Como (lake)', 'text': 'Como is a lake near Lecco.'},
  {'id': 'p2', 'title': 'Lecco', 'text': 'Lecco is a city of Lombardy.'},
  {'id': 'p3', 'title': 'PMID 17', 'text': 'Lombardy is a region.'},
]
_HOPS = {
  'question': 'Which region has Lake Como?',
  'answers': ['Lombardy'],
  'gold_pids': ['p1', 'p2', 'p3'],
}
_PLAIN = {'question': 'Who wrote Emma?', 'answers': ['Jane Austen', 'Austen']}
_COMMAND = (
  *('data', 'demonstrate', '--config=own', '--config.data.root=.'),
  *('--config.data.evaluation=', '--config.evaluate.every=0'),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  _write('corpus.jsonl', _PASSAGES)
  return tmp_path


def _write(name, rows):
  with open(name, 'w') as file:
    file.writelines(json.dumps(row) + '\n' for row in rows)


def _demonstrated(capsys, questions, rows, **keys):
  """Returns the demonstrations that the command prints."""
  _write('train.jsonl', questions)
  keys = {
    'sft.batch_size': 2,
    'sft.clean_steps': 0,
    'sft.quote_words': 0,
  } | keys
  flags = [f'--config.{key}={value}' for key, value in keys.items()]
  code = __main__.main([*_COMMAND, f'--rows={rows}', *flags])
  out, err = capsys.readouterr()
  assert (code, err) == (0, '')
  return [json.loads(line) for line in out.splitlines()]


def _searches(demonstration):
  """Returns the queries of a dialogue."""
  *turns, last = demonstration['turns']
  assert all(turn.endswith(' </search>') for turn in turns)
  assert last.endswith(' </answer>')
  return [_inside(turn, 'search') for turn in turns]


def _inside(turn, tag):
  return turn.split(f'<{tag}> ')[1].removesuffix(f' </{tag}>')


@pytest.mark.parametrize(
  ('max_turns', 'searches'),
  [(1, ['Como (lake)']), (3, ['Como (lake)', 'Lecco'])],
)
def test_what_was_read_is_searched_for(folder, capsys, max_turns, searches):
  rows = _demonstrated(
    capsys,
    [_HOPS, _PLAIN],
    4,
    **{'sft.error_rate': 0, 'env.max_turns': max_turns},
  )
  assert len(rows) == 4
  for row in rows:
    hops = row['question'] == _HOPS['question']
    assert _searches(row) == (searches if hops else [_PLAIN['question']])
    answer = 'Lombardy' if hops else 'Jane Austen'
    assert _inside(row['turns'][-1], 'answer') == answer


def test_errors_occur_at_their_rate_and_end_in_guesses(folder, capsys):
  questions = [
    {'question': f'Which lake is {n}?', 'answers': [str(n)]} for n in range(64)
  ]
  rows = _demonstrated(
    capsys, questions, 1024, **{'sft.error_rate': 0.3, 'sft.batch_size': 64}
  )
  answers = [_inside(row['turns'][-1], 'answer') for row in rows]
  right = [a == row['answers'][0] for a, row in zip(answers, rows)]
  # Two decisions, and a guess is right once in 64 times.
  expected = 0.49 + 0.51 / 64
  assert abs(sum(right) / 1024 - expected) < 3 * (expected / 2 / 1024) ** 0.5
  searched = [_searches(row) for row in rows]
  assert set(map(len, searched)) == {0, 1}
  partial = [s == ['Which'] for s in searched]
  assert abs(sum(partial) / 1024 - 0.15) < 3 * (0.15 * 0.85 / 1024) ** 0.5


def test_answers_quote_up_to_so_many_words_of_the_gold_passage(folder, capsys):
  keys = {'sft.error_rate': 0, 'sft.quote_words': 4}
  rows = _demonstrated(capsys, [_HOPS, _PLAIN], 200, **keys)
  lengths = collections.Counter()
  for row in rows:
    assert _searches(row) == [row['question']]
    answer = _inside(row['turns'][-1], 'answer')
    if row['question'] == _PLAIN['question']:
      assert answer == 'Jane Austen'  # it names no passage
    else:
      assert _PASSAGES[0]['text'].startswith(answer)
      lengths[len(answer.split())] += 1
  assert set(lengths) == {1, 2, 3, 4}
  # A quarter each, up to three standard deviations.
  assert all(abs(n - 25) < 3 * (100 * 3 / 16) ** 0.5 for n in lengths.values())


def test_who_quotes_errs_only_in_searching_and_only_after_clean_steps(
  folder, capsys
):
  other = _HOPS | {'question': 'Where is it?', 'answers': ['Lecco']}
  keys = {'sft.error_rate': 0.5, 'sft.quote_words': 9, 'sft.clean_steps': 100}
  rows = _demonstrated(capsys, [_HOPS, other], 600, **keys)
  quotes = [
    _PASSAGES[0]['text'].startswith(_inside(row['turns'][-1], 'answer'))
    for row in rows
  ]
  assert all(quotes[:200])  # 100 steps of two dialogues
  assert abs(sum(quotes[200:]) / 400 - 0.5) < 3 * (0.25 / 400) ** 0.5
  excerpts = [row['question'] in _PASSAGES[0]['text'] for row in rows]
  assert abs(sum(excerpts[:200]) / 200 - 0.5) < 3 * (0.25 / 200) ** 0.5
  assert not any(excerpts[200:])
  for row, quote in zip(rows, quotes):
    answer = _inside(row['turns'][-1], 'answer')
    assert quote or answer in ('Lecco', 'Lombardy')
    assert not quote or _searches(row) == [row['question']]


def test_a_file_of_demonstrations_is_imitated(folder, capsys):
  made = _demonstrated(capsys, [_HOPS, _PLAIN], 2)
  _write('mine.jsonl', [made[0] | {'turns': ['<answer> it </answer>']}, *made])
  keys = {'sft.demonstrations': 'mine.jsonl', 'sft.batch_size': 3}
  rows = _demonstrated(capsys, [_PLAIN], 6, **keys)
  turns = sorted(row['turns'] for row in rows[:3])
  assert turns == sorted(
    [['<answer> it </answer>'], *(row['turns'] for row in made)]
  )
  assert sorted(row['turns'] for row in rows[3:]) == turns


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    (None, "config.sft.demonstrations='mine.jsonl': no such file"),
    (json.dumps(_PLAIN), 'mine.jsonl:1: "turns": '),
    (json.dumps(_PLAIN | {'turns': 'x'}), 'mine.jsonl:1: "turns": '),
    ('3', 'mine.jsonl:1: expected an object'),
  ],
)
def test_a_wrong_file_is_named(folder, refused, text, message):
  if text is not None:
    (folder / 'mine.jsonl').write_text(text)
  _write('train.jsonl', [_PLAIN])
  flag = '--config.sft.demonstrations=mine.jsonl'
  assert refused(*_COMMAND, flag).startswith(message)


def test_nothing_can_be_quoted_without_gold_passages(folder, refused):
  _write('train.jsonl', [_PLAIN])
  line = 'sft.quote_words=40: no question has gold_pids'
  assert line in refused(*_COMMAND)
