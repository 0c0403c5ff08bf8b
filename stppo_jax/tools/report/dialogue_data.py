"""Encodes the dialogues of runs for the viewer: an index, and packed parts.

The index has a row for each dialogue, with the values by which the viewer
lists, filters and sorts dialogues. A part has the dialogues themselves: the
compressed lines of dialogue files. A step of a run has one part for its
training dialogues and one part for the dialogues of its evaluation. A page
with thousands of dialogues opens at once, because it unpacks a part only when a
reader opens a dialogue of this part.
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
# The column `kind` has the index of a kind in this tuple.
KINDS = (run_files.SAMPLED, run_files.EVALUATED)
TRAINING, EVALUATION = range(2)
_DIGITS = 6


class Encoded(NamedTuple):
  """The dialogues of a page.

  Attributes:
    index: the columns of `COLUMNS` by name, a list of the questions, and a list
      of the statuses. The columns `question` and `status` have indices into
      these lists.
    parts: the packed parts. The column `part` has indices into this list.
    notes: messages about the steps that were left out.
  """

  index: dict[str, Any]
  parts: list[str]
  notes: list[str]


class _Part(NamedTuple):
  """The training or evaluation dialogues of a run's step, and their lines.

  The lines are compressed, see `pack`.
  """

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
  """Encodes the dialogues of runs, with fewer steps if a limit is exceeded.

  The steps that are kept are evenly spread.

  Args:
    runs: the runs.
    most: the largest number of dialogues. The dialogues of evaluations get at
      most half of this number.
    most_bytes: the largest size of all parts together, in bytes.
    losses: a list to which a message is added for each dialogue that cannot be
      read.
  """
  parts: list[_Part] = []
  notes: list[str] = []
  # Evaluations come first and get up to half of both limits: they are rare, and
  # a comparison of evaluations needs several of them.
  for kind, share in ((EVALUATION, 0.5), (TRAINING, 1.0)):
    count = sum(len(part.records) for part in parts)
    size = sum(len(part.packed) for part in parts)
    # Training gets the rest of both limits.
    limit, limit_bytes = (
      int(share * rest) for rest in (most - count, most_bytes - size)
    )
    files: dict[tuple[int, int], list[pathlib.Path]] = {}
    for number, run in enumerate(runs):
      for step, path in run_files.dialogue_files(run.folder, kind=KINDS[kind]):
        files.setdefault((number, step), []).append(path)
    # Steps are left out twice, once for each limit. The number of dialogues is
    # counted before the files are parsed, but the packed size is only known
    # afterwards.
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
  """Returns the number of dialogues in a file, or 0 if the file is gone."""
  try:
    return path.read_bytes().count(b'\n')
  except OSError:
    return 0


def _thin(items: Sequence[Any], sizes: Sequence[int], most: int) -> list[Any]:
  """Returns evenly spread items whose sizes add up to at most `most`.

  If the last item alone is larger than `most`, the list is empty. Otherwise the
  last item is one of the returned items.
  """
  # Sizes differ, so the number of items that fit depends on the chosen items.
  # If a choice is too large, the next try takes proportionally fewer items.
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
  """Reads the dialogues of a step from the files of all hosts."""
  pairs = [pair for path in paths for pair in run_files.dialogues(path, losses)]
  lines = b'\n'.join(line for line, _ in pairs)
  records = [record for _, record in pairs]
  return _Part(run, step, kind, records, pack(lines))


def _index(parts: Sequence[_Part]) -> dict[str, Any]:
  """Returns the index of the dialogues in parts, see `Encoded`."""
  questions: dict[str, int] = {}
  keys: dict[tuple[str, str, str], int] = {}
  statuses: dict[str, int] = {}
  rows = []
  for number, part in enumerate(parts):
    for place, record in enumerate(part.records):
      question, status = record['question'], record['status']
      # In data files without ids, the row number is the id, so ids alone are
      # not unique.
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
  """Returns the outcome reward of a dialogue: the sum of its reward terms."""
  values = record['rewards'].values()
  return float(sum(x for x in values if run_files.is_number(x)))


def contains(record: Mapping[str, Any], text: str) -> bool:
  """Returns whether a dialogue contains a text, whatever the case of letters.

  As in the viewer, the text may be in the question, the prompt, a golden
  answer, a turn or an observation.
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
    The share of policy tokens that are clipped, the number of searches (turns
    that asked the environment something), the number of turns, the number of
    policy tokens, and the largest absolute value of the log of a turn's ratio.
    The first, the fourth and the fifth value are None if the record has no
    values of tokens. The fifth value is also None if no turn has a ratio.
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
  """Returns content as base64 text after compression by zlib."""
  return base64.b64encode(zlib.compress(content, 6)).decode()


def pack_json(value: Any) -> str:
  """Returns a value as JSON text, compressed and encoded by `pack`."""
  text = json.dumps(value, separators=(',', ':'), allow_nan=False)
  return pack(text.encode())


def rounded(value: float | None) -> float | None:
  """Returns a value to six significant digits; None for None, nan and inf."""
  if value is None or not math.isfinite(value):
    return None
  return float(f'{value:.{_DIGITS}g}')
