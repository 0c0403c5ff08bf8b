"""Shows the dialogues of a step in a terminal: a list, and single ones."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from stppo_jax import streams
from stppo_jax.records import dialogues
from stppo_jax.tools.report import dialogue_data

_QUESTION = 60  # characters of a question in the list
_TITLES = (
  'no.',
  'reward',
  'status',
  'turns',
  'searches',
  'clipped',
  'question',
)
# Heading -> name in a record's `tokens`.
_NUMBERS = {
  'ratio': 'ratio',
  'old logprob': 'old_logprob',
  'advantage': 'advantage',
  'value': 'value',
  'entropy': 'entropy',
  'weight': 'weight',
}


def table(records: Mapping[int, Mapping[str, Any]]) -> list[str]:
  """Returns the lines of a list of dialogues, by their number in the step."""
  rows: list[Sequence[str]] = [_TITLES]
  for number, record in records.items():
    clipped, searches, turns, _, _ = dialogue_data.measures(record)
    question = streams.escape(record['question'])
    question = question.replace('\n', ' ')
    if len(question) > _QUESTION:
      question = f'{question[: _QUESTION - 3]}...'
    rows.append(
      (
        str(number),
        f'{dialogue_data.reward(record):.3g}',
        streams.escape(record['status']),
        f'{turns:.0f}',
        f'{searches:.0f}',
        '' if clipped is None else f'{clipped:.1%}',
        question,
      )
    )
  return streams.aligned(rows)


def text(record: Mapping[str, Any], *, colour: bool, tokens: bool) -> str:
  """Returns a dialogue as text without control characters.

  Args:
    record: a line of `trajectories-*.jsonl`.
    colour: whether to write ANSI colours.
    tokens: whether a table of the tokens follows, where they have numbers.
  """
  lines = [dialogues.render(record, colour=colour).rstrip('\n')]
  if tokens:
    for number, turn in enumerate(record['turns'], start=1):
      if 'tokens' in turn:
        ratio = turn['tokens'].get('turn_ratio')
        lines += ['', f'turn {number}, ratio {_shown(ratio)}']
        lines += _token_table(turn)
  return '\n'.join(lines)


def _token_table(turn: Mapping[str, Any]) -> list[str]:
  numbers = turn['tokens']
  names = {title: name for title, name in _NUMBERS.items() if name in numbers}
  rows: list[Sequence[str]] = [('token', *names, 'clipped')]
  start, clipped = 0, set(numbers['clipped'])
  for place, count in enumerate(numbers['characters']):
    piece = turn['text'][start : start + count]
    start += count
    rows.append(
      (
        streams.escape(piece).replace('\n', '\\n'),
        *(_shown(numbers[name][place]) for name in names.values()),
        'clipped' if place in clipped else '',
      )
    )
  return streams.aligned(rows)


def _shown(value: float | None) -> str:
  return '' if value is None else f'{value:.4g}'
