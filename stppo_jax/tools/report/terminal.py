"""Shows the dialogues of a step in a terminal: a list, or one dialogue."""

from collections.abc import Mapping, Sequence
import pathlib
import sys
from typing import Any

from stppo_jax import exits
from stppo_jax import streams
from stppo_jax import types
from stppo_jax.records import dialogues
from stppo_jax.tools.report import dialogue_data
from stppo_jax.tools.report import run_files

STATUSES = tuple(status.value for status in types.TrajectoryStatus)
_QUESTION = 60  # the most characters of a question in the list
_TITLES = 'no. reward status turns searches clipped question'.split()


def _passes(record: Mapping[str, Any], flags: Any) -> bool:
  """Returns whether a dialogue passes the filters in the flags of `view`."""
  reward = dialogue_data.reward(record)
  _, searches, *_ = dialogue_data.measures(record)
  return (
    flags.status in (None, record['status'])
    and (flags.least is None or reward >= flags.least)
    and (flags.most is None or reward <= flags.most)
    and flags.searches in (None, searches)
    and dialogue_data.contains(record, flags.text)
  )


def lines(folder: str, losses: list[str], flags: Any) -> list[str]:
  """Returns the lines of a list of a step's dialogues, or of one dialogue.

  Args:
    folder: the folder of a run.
    losses: a list to which a message is added for each line or file that cannot
      be read.
    flags: the flags of the command `view`. Its help text describes them.

  Raises:
    Misconfigured: the run has no dialogues of this step, or the step has no
      dialogue with this number.
  """
  kind = run_files.EVALUATED if flags.evaluation else run_files.SAMPLED
  # Each host writes its own file, so a step may have several files.
  files: dict[int, list[pathlib.Path]] = {}
  for found, path in run_files.dialogue_files(folder, kind=kind):
    files.setdefault(found, []).append(path)
  if not files:
    raise exits.Misconfigured(
      f'{folder}: has no dialogues; writer.{kind} sets how many a run writes'
    )
  step = max(files) if flags.step is None else flags.step
  if step not in files:
    raise exits.Misconfigured(
      f'--step={step}: must be one of the steps with dialogues, '
      f'{min(files)} to {max(files)}'
    )
  records = [
    record
    for path in files[step]
    for _, record in run_files.dialogues(path, losses)
  ]
  if flags.number is None:
    shown = {
      place: record
      for place, record in enumerate(records, start=1)
      if _passes(record, flags)
    }
    title = f'step {step}: {len(shown)} of {len(records)} dialogues'
    return [title, *table(shown)]
  if not 1 <= flags.number <= len(records):
    raise exits.Misconfigured(
      f'--number={flags.number}: must be from 1 to {len(records)}, the number '
      f'of dialogues of step {step}'
    )
  record, colour = records[flags.number - 1], sys.stdout.isatty()
  return [text(record, colour=colour, tokens=flags.tokens)]


def table(records: Mapping[int, Mapping[str, Any]]) -> list[str]:
  """Returns the lines of a table of dialogues.

  Args:
    records: the dialogues, keyed by their numbers in the step.
  """
  rows: list[Sequence[str]] = [_TITLES]
  for number, record in records.items():
    clipped, searches, turns, _, _ = dialogue_data.measures(record)
    # Texts of models and of data sets may contain control sequences, which can
    # make a terminal clear its screen or change its title.
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
    tokens: whether to add a table of tokens for each turn that has token
      values.
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
  names = [name for name in run_files.TOKEN_NUMBERS if name in numbers]
  titles = (name.replace('_', ' ') for name in names)
  rows: list[Sequence[str]] = [('token', *titles, 'clipped')]
  # For each token, the record has the number of characters that the token adds
  # to the text. If a character is spread over several tokens, some of them add
  # 0 characters.
  start, clipped = 0, set(numbers['clipped'])
  for place, count in enumerate(numbers['characters']):
    piece = turn['text'][start : start + count]
    start += count
    rows.append(
      (
        streams.one_line(piece),
        *(_shown(numbers[name][place]) for name in names),
        'clipped' if place in clipped else '',
      )
    )
  return streams.aligned(rows)


def _shown(value: float | None) -> str:
  return '' if value is None else f'{value:.4g}'
