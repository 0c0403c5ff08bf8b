"""Reads and writes the table of a study: a line for each step of each run.

    group,arm,seed,settings,step,success,...

`settings` is a digest of the config of the run's arm. If the config of an arm
has another digest now, the table is refused. A cell is empty if the step has no
value of that column, or a value that is not finite. A file whose name ends with
`.gz` is compressed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import csv
import dataclasses
import fcntl
import functools
import gzip
import io
import math
import os
import pathlib
import zlib

import numpy as np

from stppo_jax import exits
from stppo_jax.records import headline
from stppo_jax.tools import success_curve
from stppo_jax.tools.report import run_files
from stppo_jax.workdir import atomic_files

_LEVELS = ('token', 'turn', 'sequence')
# The alarms of `training/alarms.py` that the policy itself can cause.
ALARMS = (
  'repetition entropy turn_ratio zero_variance explained_variance '
  'empty_answers finish_ratio search_rate kl'
).split()
# Maps a column to the metrics whose sum is the value of the column.
# docs/metrics.md explains the metrics.
METRICS = {
  'success': ('critic/score/mean',),
  **{
    f'clip_{level}': (f'clipfrac/{level}/low', f'clipfrac/{level}/high')
    for level in _LEVELS
  },
  'cut': ('actor/pg_clipfrac',),
  **{f'ratio_max_{level}': (f'ratio/{level}/max',) for level in _LEVELS},
  'entropy': ('actor/entropy',),
  'kl_old': ('actor/ppo_kl',),
  'kl_reference': ('critic/kl',),
  'explained_variance': ('critic/vf_explained_var',),
  'spread_clipped': ('stab/norm_clipped',),
  'spread_unclipped': ('stab/norm_unclipped',),
  'rho': ('stab/rho',),
  'scale': ('stab/scale',),
  'turn_length': ('turn_length/mean',),
  **{f'alarm_{name}': (f'alarm/{name}',) for name in ALARMS},
}
# The column of the greedy policy's mean score over the evaluation sets.
_GREEDY = 'greedy'
COLUMNS = ('success', _GREEDY, *[n for n in METRICS if n != 'success'])
_KEYS = ('group', 'arm', 'seed', 'settings', 'step')
_HEAD = (*_KEYS, *COLUMNS)
_DIGITS = 5


@dataclasses.dataclass(frozen=True)
class Run:
  """The metrics of a finished run in each step.

  Attributes:
    group: the group of the run's arm.
    arm: the name of the run's arm.
    seed: the seed of the run.
    settings: the digest of the arm's config.
    columns: maps the name of a column to an array with one value for each step.
      Step 0 is the evaluation before training. The value is nan in a step that
      does not have the column's metric.
  """

  group: str
  arm: str
  seed: int
  settings: str
  columns: Mapping[str, np.ndarray]

  @property
  def key(self) -> tuple[str, str]:
    """Returns the key of the run's arm: the group and the name."""
    return self.group, self.arm

  def per_step(self, column: str) -> np.ndarray:
    """Returns a column without step 0, the evaluation before training."""
    return self.columns[column][1:]

  @functools.cached_property
  def curve(self) -> success_curve.Curve:
    """Returns the success of the run in a few numbers, see `Curve`."""
    return success_curve.curve(self.per_step('success'))


def from_folder(
  folder: pathlib.Path, arm: tuple[str, str], seed: int, digest: str
) -> Run:
  """Returns the metrics of the run in a folder.

  Args:
    folder: the run's folder.
    arm: the key of the run's arm.
    seed: the seed of the run.
    digest: the digest of the arm's config.

  Raises:
    Misconfigured: the metrics of the run cannot be read.
  """
  found = run_files.read(str(folder))
  # Missing steps would change the means of a run, so a damaged run is refused
  # and has to be made again.
  if found.losses:
    raise exits.Misconfigured(
      f'{folder}/metrics.jsonl: damaged; to make the run again, delete its '
      'folder'
    )
  count = found.lines[-1]['step'] + 1
  columns = {name: np.full(count, math.nan) for name in COLUMNS}
  for line in found.lines:
    numbers = {k: x for k, x in line.items() if run_files.is_number(x)}
    for name, parts in METRICS.items():
      if all(part in numbers for part in parts):
        columns[name][line['step']] = sum(numbers[part] for part in parts)
    for score in headline.evaluation(numbers).values():
      columns[_GREEDY][line['step']] = score
  # The values are rounded as in a table, so that a comparison gives the same
  # result before the table is written and after the table is read back.
  columns = {name: rounded(x) for name, x in columns.items()}
  return Run(*arm, seed, digest, columns)


def rounded(values: np.ndarray) -> np.ndarray:
  """Returns values rounded to the digits that a table keeps."""
  return np.array([float(_text(x) or 'nan') for x in values])


def read(path: pathlib.Path) -> list[Run]:
  """Returns the runs of a table, or [] if the file does not exist.

  Raises:
    Misconfigured: the file cannot be read, has unknown columns, or has a
      damaged line.
  """
  try:
    return _read(path)
  except FileNotFoundError:
    return []
  except (
    *(UnicodeDecodeError, csv.Error),
    *(gzip.BadGzipFile, EOFError, zlib.error),
  ) as error:
    raise exits.Misconfigured(
      f'{path}: not a table of ablate: {error}'
    ) from error
  except OSError as error:
    raise exits.Misconfigured(f'{path}: {error.strerror}') from error


def _read(path: pathlib.Path) -> list[Run]:
  lines: dict[tuple[str, str, int, str], list[list[float]]] = {}
  opened = gzip.open if path.suffix == '.gz' else open
  with opened(path, 'rt', encoding='utf-8', newline='') as file:
    reader = csv.reader(file)
    head = next(reader, [])
    names = head[len(_KEYS) :]
    # A table of an earlier version has fewer columns, and is accepted.
    if tuple(head[: len(_KEYS)]) != _KEYS or not {'success'} <= set(
      names
    ) <= set(COLUMNS):
      raise exits.Misconfigured(
        f'{path}: not a table of ablate: its first line must be '
        f'{",".join(_HEAD)}'
      )
    for number, words in enumerate(reader, start=2):
      try:
        group, arm, seed, digest, step, *cells = words
        values = [float(cell or 'nan') for cell in cells]
        rows = lines.setdefault((group, arm, int(seed), digest), [])
        if len(values) != len(names) or int(step) != len(rows):
          raise ValueError
      except ValueError as error:
        raise exits.Misconfigured(
          f'{path}, line {number}: damaged; it must have {len(head)} cells, '
          'and the steps of a run must follow one another'
        ) from error
      rows.append(values)
  runs = []
  for key, rows in lines.items():
    columns = dict(zip(names, np.array(rows).T))
    nothing = np.full(len(rows), math.nan)
    runs.append(Run(*key, {x: columns.get(x, nothing) for x in COLUMNS}))
  return runs


def distinct(runs: Iterable[Run]) -> list[Run]:
  """Returns the runs of several tables, each run once.

  Runs are the same if they have the same settings and the same seed.
  """
  return list({(run.settings, run.seed): run for run in runs}.values())


def add(
  path: pathlib.Path,
  runs: Sequence[Run],
  digests: Mapping[tuple[str, str], str],
) -> list[Run]:
  """Adds runs to a table while other processes may also add runs.

  Args:
    path: the path of the table.
    runs: the new runs. A run that is already in the table is skipped.
    digests: maps the key of each arm of the study to the digest of its config.

  Returns:
    All runs of the table, sorted by seed, then by the order of the arms.

  Raises:
    Misconfigured: see `read` and `check`.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  with _locked(path.parent):
    found = read(path)
    check(found, digests, path)
    known = {(run.key, run.seed) for run in found}
    found += [run for run in runs if (run.key, run.seed) not in known]
    places = {key: place for place, key in enumerate(digests)}
    # The runs are sorted, so the file does not depend on which run ended first.
    found.sort(key=lambda run: (run.seed, places[run.key]))
    write(path, found)
  return found


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
  """Keeps other processes from adding to the tables of a folder."""
  # The folder itself is locked, so that no lock file is left beside the table.
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    with contextlib.suppress(OSError):  # the file system has no such locks
      fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
  finally:
    os.close(descriptor)


def write(path: pathlib.Path, runs: Iterable[Run]) -> None:
  """Writes runs as a table, which replaces an earlier table."""
  text = io.StringIO()
  writer = csv.writer(text, lineterminator='\n')
  writer.writerow(_HEAD)
  for run in runs:
    start = (run.group, run.arm, run.seed, run.settings)
    table = np.array([run.columns[name] for name in COLUMNS]).T
    for step, values in enumerate(table):
      writer.writerow([*start, step, *map(_text, values)])
  data = text.getvalue().encode()
  if path.suffix == '.gz':
    data = gzip.compress(data, mtime=0)  # equal tables give equal bytes
  atomic_files.replace(path, data)


def _text(value: float) -> str:
  return f'{value:.{_DIGITS}g}' if math.isfinite(value) else ''


def check(
  runs: Sequence[Run], digests: Mapping[tuple[str, str], str], path: object
) -> None:
  """Checks that the runs of a table belong to the arms of a study.

  Args:
    runs: the runs of a table.
    digests: maps the key of each arm of the study to the digest of its config.
    path: the path of the table, for the messages.

  Raises:
    Misconfigured: a run belongs to no arm of the study, had other settings than
      its arm has now, or has another number of steps than another run of the
      same arm.
  """
  lengths: dict[tuple[str, str], int] = {}
  for run in runs:
    name = ' '.join(part for part in run.key if part)
    if run.key not in digests:
      raise exits.Misconfigured(
        f'{path}: has {name!r}, which is no arm of this study'
      )
    if run.settings != digests[run.key]:
      raise exits.Misconfigured(
        f'{path}: its runs of {name!r} had other settings ({run.settings}) '
        f'than the config has now ({digests[run.key]}), so they cannot be '
        'compared; give another --table'
      )
    length = len(run.columns['success']) - 1
    if lengths.setdefault(run.key, length) != length:
      raise exits.Misconfigured(
        f'{path}: its runs of {name!r} have {lengths[run.key]} and {length} '
        'steps, so they cannot be compared'
      )
