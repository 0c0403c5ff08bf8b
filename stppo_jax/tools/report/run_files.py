"""Reads the files of a run of `train`, which may be incomplete.

A run may still be going, may have been killed in the middle of a line, or may
have metrics that are not finite. Data that cannot be read is left out, and a
message says so.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import json
import math
import pathlib
import re
from typing import Any

import numpy as np

from stppo_jax import exits
from stppo_jax import settings
from stppo_jax.configs import schema
from stppo_jax.records import scrubbing
from stppo_jax.tools import run_state
from stppo_jax.tools import success_curve
from stppo_jax.workdir import run_folder

REWARD = 'critic/score/mean'
SAMPLED, EVALUATED = 'trajectories', 'evaluation'
_DIALOGUES = re.compile(
  rf'({SAMPLED}|{EVALUATED})-(\d{{6,}})(-host\d+)?\.jsonl'
)
# The prefix of the metrics outside/LEVEL: the share of tokens whose ratio is
# outside the bounds. No line of metrics.jsonl has these metrics. `Run.columns`
# computes them as the sums of the shares below and above the bounds.
OUTSIDE = 'outside/'
_BELOW = re.compile(r'clipfrac/([^/]+)/low(/.*)?')
_COMMAND = 'train'
# The names of the lists in a turn's `tokens` that have one value for each
# token, see `records/token_records.py`.
TOKEN_NUMBERS = tuple(
  'ratio old_logprob advantage value entropy weight'.split()
)


@dataclasses.dataclass(frozen=True)
class Run:
  """A run as its files describe it.

  Attributes:
    folder: the folder with the files of the run.
    place: the folder as the user named it, or the address of the run in a
      bucket if the folder is a local copy.
    recorded: the values of the run's config by their dotted keys. Keys that
      were renamed since the run have their present names. Secrets in texts are
      removed, because reports are passed on. If the config cannot be read,
      `recorded` is {}.
    lines: the metrics of each step: the lines of metrics.jsonl, in order. The
      first line may be about step 0, the evaluation before training.
    state: the state of the run, as the command `status` shows it.
    losses: messages about data that could not be read.
  """

  folder: str
  place: str
  recorded: Mapping[str, Any]
  lines: list[dict[str, Any]]
  state: run_state.RunState
  losses: list[str]

  @property
  def title(self) -> str:
    """Returns the title of the run, or the name of its folder."""
    return str(self.recorded.get('title') or pathlib.Path(self.place).name)

  @property
  def seed(self) -> Any:
    """Returns the seed of the run, or None if the seed is not known."""
    return self.recorded.get('seed')

  @functools.cached_property
  def columns(self) -> dict[str, dict[int, float]]:
    """Returns the finite values of each metric, by metric and then by step.

    The metrics are in the order in which the lines first name them. The metrics
    outside/LEVEL and outside/LEVEL/turn_N, which are computed here, come last.
    """
    columns: dict[str, dict[int, float]] = {}
    for line in self.lines:
      for name, value in line.items():
        if name != 'step' and is_number(value):
          columns.setdefault(name, {})[line['step']] = value
    # No token is both below and above the bounds, so the two shares can be
    # added.
    for name, low in list(columns.items()):
      if match := _BELOW.fullmatch(name):
        high = columns.get(name.replace('/low', '/high', 1), {})
        if sums := {
          step: x + high[step] for step, x in low.items() if step in high
        }:
          columns[f'{OUTSIDE}{match[1]}{match[2] or ""}'] = sums
    return columns

  def column(self, name: str) -> dict[int, float]:
    """Returns the finite values of a metric by step."""
    return self.columns.get(name, {})

  @functools.cached_property
  def curve(self) -> success_curve.Curve:
    """Returns the success of the run in a few numbers, see `Curve`."""
    rewards = self.column(REWARD)
    return success_curve.curve(np.array(list(rewards.values())), list(rewards))


def is_number(value: Any) -> bool:
  """Returns whether a value, such as a value from JSON, is a finite number."""
  is_real = isinstance(value, int | float) and not isinstance(value, bool)
  try:
    return is_real and math.isfinite(value)
  except OverflowError:  # an integer may be too large for a float
    return False


def check(folder: str, place: str = '') -> run_state.RunState:
  """Checks that this version can read a run, and returns the run's state.

  Args:
    folder: the folder of the run.
    place: the address of the run, if the folder was downloaded from a bucket.

  Raises:
    Misconfigured: the folder does not belong to a run of `train`, or its files
      have a schema that this version does not read.
  """
  place = place or folder
  state = run_state.read_from(pathlib.Path(folder), place)
  if state.command != _COMMAND:
    raise exits.Misconfigured(
      f'{place}: a run of {state.command}; a report shows runs of {_COMMAND}'
    )
  found = run_folder.schema(pathlib.Path(folder))
  if found != run_folder.SCHEMA:
    raise exits.Misconfigured(
      f'{place}: its files have schema {found}, and this version reads '
      f'schema {run_folder.SCHEMA}; use the version that wrote them'
    )
  return state


def read(folder: str, place: str = '') -> Run:
  """Reads the state, the metrics and the config of a run.

  Args:
    folder: the folder of the run.
    place: the address of the run, if the folder was downloaded from a bucket.

  Raises:
    Misconfigured: see `check`; or the run has written no metrics yet.
  """
  place = place or folder
  state = check(folder, place)
  path = pathlib.Path(folder)
  losses: list[str] = []
  lines = [
    line
    for _, line in _objects(path / 'metrics.jsonl', losses)
    if isinstance(line.get('step'), int) and is_number(line['step'])
  ]
  if not lines:
    raise exits.Misconfigured(
      '\n'.join([f'{place}: no step is written yet', *losses])
    )
  return Run(folder, place, _config(path, losses), lines, state, losses)


def dialogue_files(
  folder: str, *, kind: str = SAMPLED
) -> list[tuple[int, pathlib.Path]]:
  """Returns (step, file) of each file of a run's dialogues, sorted by step.

  Args:
    folder: the folder of the run.
    kind: SAMPLED for the dialogues that were trained on, or EVALUATED for the
      dialogues of evaluations.
  """
  return sorted(
    (int(match[2]), path)
    for path in pathlib.Path(folder).iterdir()
    if (match := _DIALOGUES.fullmatch(path.name)) and match[1] == kind
  )


def dialogues(
  path: pathlib.Path, losses: list[str]
) -> list[tuple[bytes, dict[str, Any]]]:
  """Returns (line, parsed line) of each dialogue in a file.

  Lines that are no dialogues are left out. A message about each of them is
  added to `losses`.
  """
  found = []
  for line, record in _objects(path, losses):
    if _is_dialogue(record):
      found.append((line, record))
    else:
      losses.append(f'{path}: a line is no dialogue; it was dropped')
  return found


def _is_dialogue(record: Any) -> bool:
  """Returns whether a record has the fields that every dialogue has."""
  return (
    _has(record, str, 'question', 'prompt', 'status')
    and _has(record, list, 'golden_answers', 'turns')
    and _has(record, dict, 'rewards')
    and all(map(is_number, record['rewards'].values()))
    and all(isinstance(answer, str) for answer in record['golden_answers'])
    and all(map(_is_turn, record['turns']))
  )


def _is_turn(turn: Any) -> bool:
  return _has(turn, str, 'text', 'observation', 'action') and (
    'tokens' not in turn or _is_tokens(turn['tokens'])
  )


def _is_tokens(tokens: Any) -> bool:
  """Returns whether the lists and the ratio in a turn's `tokens` are valid."""
  if not _has(tokens, list, 'characters', 'clipped'):
    return False
  characters = tokens['characters']
  lists = [tokens[name] for name in TOKEN_NUMBERS if name in tokens]
  return (
    all(
      isinstance(x, int) and is_number(x)
      for x in characters + tokens['clipped']
    )
    and _is_number_or_none(tokens.get('turn_ratio'))
    and all(
      isinstance(values, list)
      and len(values) == len(characters)
      and all(map(_is_number_or_none, values))
      for values in lists
    )
  )


def _has(record: Any, kind: type, *names: str) -> bool:
  """Returns whether a record is a dict with a value of `kind` for each name."""
  return isinstance(record, dict) and all(
    isinstance(record.get(name), kind) for name in names
  )


def _is_number_or_none(value: Any) -> bool:
  return value is None or is_number(value)


def _config(folder: pathlib.Path, losses: list[str]) -> dict[str, Any]:
  """Returns the field `recorded` of a `Run`.

  If the config cannot be read, the result is {}, and a message is added to
  `losses`.
  """
  path = folder / 'config.json'
  try:
    config = settings.flatten(json.loads(path.read_text('utf-8')))
    return scrubbing.scrubbed_values(schema.present(config))
  except (OSError, ValueError, AttributeError, RecursionError) as error:
    losses.append(f'{path}: cannot be read: {error}')
    return {}


def _objects(
  path: pathlib.Path, losses: list[str]
) -> Iterator[tuple[bytes, dict[str, Any]]]:
  """Yields (line, parsed line) of a file with one JSON object on each line.

  The yielded lines are strict JSON: a number that is not finite becomes null.
  A message about each line that is left out is added to `losses`.
  """
  try:
    text = path.read_bytes()
  except FileNotFoundError:
    return
  except OSError as error:
    losses.append(f'{path}: {error.strerror}')
    return
  # The text after the last line break is empty, or is a line that was cut off.
  *lines, rest = text.split(b'\n')
  for number, line in enumerate(lines, start=1):
    try:
      value = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
      value = None
    if not isinstance(value, dict):
      losses.append(f'{path}: line {number} is no JSON object; it was dropped')
    # The page contains the line itself, and browsers cannot parse NaN. So a
    # line with NaN is written anew.
    elif b'NaN' in line or b'Infinity' in line:
      yield json.dumps(value).encode(), value
    else:
      yield line, value
  if rest:
    number = len(lines) + 1
    losses.append(f'{path}: line {number} is cut off and was dropped')
