"""Encodes the dialogues of runs for the viewer: an index, and packed steps.

The index has a row for each dialogue: what filters, sorting and the list read.
The dialogues of a step that were trained on are one packed part, the lines of
their file, and those of its evaluation are another one. So a page with
thousands of dialogues opens at once and unpacks those that are looked at.
"""

import base64
from collections.abc import Mapping, Sequence
import json
import math
import pathlib
from typing import Any, NamedTuple
import zlib

from stppo_jax.envs import protocol
from stppo_jax.tools.report import run_files

COLUMNS = (
  'run step kind part place question key reward status clipped searches turns '
  'tokens spread'
).split()
# The column `kind` has the places of these.
KINDS = (run_files.SAMPLED, run_files.EVALUATED)
TRAINING, EVALUATION = range(2)
_DIGITS = 6


class Encoded(NamedTuple):
  """The dialogues of a page.

  Attributes:
    index: `COLUMNS` by name, and the texts that they number: questions,
      statuses.
    parts: packed lines of the files, numbered by the column `part`.
    notes: what was left out, one line each.
  """

  index: dict[str, Any]
  parts: list[str]
  notes: list[str]


class _Part(NamedTuple):
  """The dialogues of one kind of a step of a run, and their lines, packed."""

  run: int
  step: int
  kind: int
  records: Sequence[Mapping[str, Any]]
  packed: str


def encode(
  runs: Sequence[run_files.Run],
  *,
  most: int,
  most_bytes: int,
  losses: list[str],
) -> Encoded:
  """Encodes the dialogues of runs, of evenly spread steps if there are many.

  Args:
    runs: the runs.
    most: the largest number of dialogues; evaluations get at most half of it.
    most_bytes: the largest size of all parts together.
    losses: gets a line for each dialogue that cannot be read.
  """
  parts: list[_Part] = []
  notes: list[str] = []
  # Evaluations are few and far between, and comparing them needs several.
  for kind, share in ((EVALUATION, 0.5), (TRAINING, 1.0)):
    count = sum(len(part.records) for part in parts)
    size = sum(len(part.packed) for part in parts)
    # Training gets what the evaluations have left of both limits.
    limit, limit_bytes = (
      int(share * rest) for rest in (most - count, most_bytes - size)
    )
    files: dict[tuple[int, int], list[pathlib.Path]] = {}
    for number, run in enumerate(runs):
      for step, path in run_files.dialogue_files(run.folder, kind=KINDS[kind]):
        files.setdefault((number, step), []).append(path)
    # There are two limits, so steps are left out twice: lines can be counted
    # without being parsed, but how well they pack is known only afterwards.
    counts = [sum(map(_count, paths)) for paths in files.values()]
    read = [
      _read(run, step, kind, paths, losses)
      for (run, step), paths in _thin(list(files.items()), counts, limit)
    ]
    kept = _thin(read, [len(part.packed) for part in read], limit_bytes)
    if len(kept) < len(files):
      reason = (
        f'{limit:,} dialogues' if kept == read else 'the size of the page'
      )
      what = ('dialogues', 'evaluations')[kind]
      notes.append(
        f'{what} of {len(kept)} of {len(files)} steps, evenly spread: '
        f'more would exceed {reason}'
      )
    parts += kept
  parts.sort(key=lambda part: (part.run, part.step, part.kind))
  return Encoded(_index(parts), [part.packed for part in parts], notes)


def _count(path: pathlib.Path) -> int:
  """Returns the number of dialogues; 0 if the run has removed the file."""
  try:
    return path.read_bytes().count(b'\n')
  except OSError:
    return 0


def _thin(items: Sequence[Any], sizes: Sequence[int], most: int) -> list[Any]:
  """Returns evenly spread items, the last included, as many as fit."""
  # Sizes differ, so how many fit depends on which are taken: every try asks for
  # fewer, in proportion to what was too much.
  wanted = len(items)
  while wanted > 0:
    places = [(n + 1) * len(items) // wanted - 1 for n in range(wanted)]
    total = sum(sizes[place] for place in places)
    if total <= most:
      return [items[place] for place in places]
    wanted = min(wanted - 1, math.ceil(wanted * most / total))
  return []


def _read(
  run: int,
  step: int,
  kind: int,
  paths: Sequence[pathlib.Path],
  losses: list[str],
) -> _Part:
  """Reads the dialogues of a step, those of all hosts."""
  pairs = [pair for path in paths for pair in run_files.dialogues(path, losses)]
  lines = b'\n'.join(line for line, _ in pairs)
  records = [record for _, record in pairs]
  return _Part(run, step, kind, records, pack(lines))


def _index(parts: Sequence[_Part]) -> dict[str, Any]:
  """Returns the columns of the index, and the texts that they number."""
  questions: dict[str, int] = {}
  keys: dict[tuple[str, str, str], int] = {}
  statuses: dict[str, int] = {}
  rows = []
  for number, part in enumerate(parts):
    for place, record in enumerate(part.records):
      question, status = record['question'], record['status']
      # Files without ids number their rows, so ids alone are not unique.
      data_set, identity = record.get('data_set', ''), record.get('id', '')
      key = str(data_set), str(identity), question
      rows.append(
        (
          part.run,
          part.step,
          part.kind,
          number,
          place,
          questions.setdefault(question, len(questions)),
          keys.setdefault(key, len(keys)),
          rounded(reward(record)),
          statuses.setdefault(status, len(statuses)),
          *map(rounded, measures(record)),
        )
      )
  columns = zip(*rows) if rows else ((),) * len(COLUMNS)
  return {
    'columns': dict(zip(COLUMNS, map(list, columns))),
    'questions': list(questions),
    'statuses': list(statuses),
  }


def reward(record: Mapping[str, Any]) -> float:
  """Returns the outcome reward of a dialogue: the sum of its terms."""
  values = record['rewards'].values()
  return float(sum(x for x in values if run_files.is_number(x)))


def contains(record: Mapping[str, Any], text: str) -> bool:
  """Returns whether a text is in question, prompt, answers or turns.

  Upper and lower case count as equal, as in the viewer.
  """
  texts = [record['question'], record['prompt'], *record['golden_answers']]
  for turn in record['turns']:
    texts += [turn['text'], turn['observation']]
  return text.lower() in '\n'.join(texts).lower()


def measures(
  record: Mapping[str, Any],
) -> tuple[float | None, float, float, float | None, float | None]:
  """Returns the measures of a dialogue that the viewer filters and sorts by.

  Returns:
    The share of its tokens that are clipped; its searches (turns that asked the
    environment anything); its turns; its policy tokens; the largest distance of
    the log of a turn ratio from 0. None where no token has numbers.
  """
  turns = record['turns']
  searches = sum(protocol.asks(turn['action']) for turn in turns)
  tokens = [t['tokens'] for t in turns if isinstance(t.get('tokens'), dict)]
  count = sum(len(numbers.get('ratio', ())) for numbers in tokens)
  clipped = distance = None
  if count:
    cut = sum(len(numbers.get('clipped', ())) for numbers in tokens)
    clipped = cut / count
    ratios = [numbers.get('turn_ratio') for numbers in tokens]
    logs = [
      abs(math.log(x)) for x in ratios if run_files.is_number(x) and x > 0
    ]
    distance = max(logs, default=None)
  return clipped, searches, len(turns), count or None, distance


def pack(content: bytes) -> str:
  """Returns compressed content as base64 text."""
  return base64.b64encode(zlib.compress(content, 6)).decode()


def pack_json(value: Any) -> str:
  """Returns a value as compressed JSON."""
  text = json.dumps(value, separators=(',', ':'), allow_nan=False)
  return pack(text.encode())


def rounded(value: float | None) -> float | None:
  """Returns a number with six digits; None if it is missing or not finite."""
  if value is None or not math.isfinite(value):
    return None
  return float(f'{value:.{_DIGITS}g}')
