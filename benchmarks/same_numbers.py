"""Compares the numbers that two checkouts of this repository compute.

    python -m benchmarks.same_numbers OLD NEW
    python -m benchmarks.same_numbers OLD NEW --steps 2 --algorithms st_ppo

Use it for a change that must not alter any number. In each checkout it trains
the quickstart for some steps and collects one batch with `lab collect`. The
processes see only the files of their checkout, under the Python of this
process. These must be equal, bit for bit:

- every number of metrics.jsonl except the times,
- every trajectory that the run wrote: texts, rewards, scores, status,
- every array of the collected batch, its token ids among them,
- every file under tests/golden, archives and JSON by their contents.

A line is printed for each comparison; the exit code is 1 if anything differs,
2 if a run fails. Both checkouts must run on the same machine and devices.
"""

import argparse
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any
from typing import NamedTuple

import numpy as np

# Metrics that depend on the clock and so differ between any two runs.
TIMES = ('timing_s/', 'perf/', 'goodput/', 'retrieval/latency')
_SHOWN = 3  # differences that a line names
# A smaller evaluation than the quickstart's, at the same steps.
_SMALL = ['--config.evaluate.num_questions=64']


class Comparison(NamedTuple):
  """The result of a comparison: the differences that it found.

  Attributes:
    subject: what was compared.
    count: the number of compared numbers, arrays or files.
    differences: a text for each difference; empty if all are equal.
  """

  subject: str
  count: int
  differences: list[str]

  def __str__(self) -> str:
    if not self.differences:
      return f'equal    {self.subject}: {self.count} compared'
    shown = '; '.join(self.differences[:_SHOWN])
    more = len(self.differences) - _SHOWN
    rest = f'; and {more} more' if more > 0 else ''
    return f'DIFFERS  {self.subject}: {shown}{rest}'


def same_number(old: Any, new: Any) -> bool:
  """Returns whether two JSON values are equal bit for bit; nan equals nan."""
  if isinstance(old, float) and isinstance(new, float):
    return repr(old) == repr(new)  # tells -0.0 from 0.0 too
  return type(old) is type(new) and old == new


def compare_metrics(
  old: Sequence[Mapping[str, Any]],
  new: Sequence[Mapping[str, Any]],
  subject: str,
) -> Comparison:
  """Compares the lines of two metrics.jsonl, without the times."""
  differences, count = [], 0
  if len(old) != len(new):
    differences.append(f'{len(old)} lines, now {len(new)}')
  for number, (before, after) in enumerate(zip(old, new), start=1):
    names = [*before, *(name for name in after if name not in before)]
    for name in names:
      if name.startswith(TIMES):
        continue
      count += 1
      if name not in before or name not in after:
        where = 'old' if name in before else 'new'
        differences.append(f'line {number}: {name} is in {where} only')
      elif not same_number(before[name], after[name]):
        differences.append(
          f'line {number}: {name} {before[name]!r}, now {after[name]!r}'
        )
  return Comparison(subject, count, differences)


def compare_trajectories(
  old: Mapping[str, Sequence[Any]],
  new: Mapping[str, Sequence[Any]],
  subject: str,
) -> Comparison:
  """Compares the trajectories that two runs wrote.

  Args:
    old: the JSON lines of each file, one per trajectory, by file name.
    new: the same for the other run.
    subject: the subject of the result.
  """
  differences, count = _missing(old, new), 0
  for name in old.keys() & new.keys():
    lengths = len(old[name]), len(new[name])
    if lengths[0] != lengths[1]:
      differences.append(f'{name}: {lengths[0]} lines, now {lengths[1]}')
    for number, (before, after) in enumerate(zip(old[name], new[name]), 1):
      count += 1
      keys = [
        key
        for key in {**before, **after}
        if repr(before.get(key)) != repr(after.get(key))
      ]
      if keys:
        differences.append(f'{name} line {number}: {", ".join(keys)}')
  return Comparison(subject, count, sorted(differences))


def compare_arrays(
  old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray], subject: str
) -> Comparison:
  """Compares arrays by dtype, shape and bytes."""
  differences = _missing(old, new)
  for name in old:
    if name not in new:
      continue
    before, after = np.asarray(old[name]), np.asarray(new[name])
    kinds = [f'{x.dtype} {list(x.shape)}' for x in (before, after)]
    if kinds[0] != kinds[1]:
      differences.append(f'{name}: {kinds[0]}, now {kinds[1]}')
    elif before.tobytes() != after.tobytes():
      count = int((_entry_bytes(before) != _entry_bytes(after)).any(1).sum())
      differences.append(f'{name}: {count} of {before.size} entries')
  return Comparison(subject, len(old), differences)


def _entry_bytes(x: np.ndarray) -> np.ndarray:
  """Returns a row of bytes for each entry: nan equals nan, -0.0 is not 0.0."""
  return np.frombuffer(x.tobytes(), np.uint8).reshape(x.size, x.itemsize)


def compare_golden(old: pathlib.Path, new: pathlib.Path) -> Comparison:
  """Compares the files of two folders: archives and JSON by their contents.

  Python files are left out: the scripts that make the others may change.
  """
  folders = [_data_files(folder) for folder in (old, new)]
  differences = _missing(*folders)
  for name in folders[0].keys() & folders[1].keys():
    before, after = folders[0][name], folders[1][name]
    if name.endswith('.npz'):
      arrays = compare_arrays(_npz(before), _npz(after), name)
      differences += [f'{name}: {line}' for line in arrays.differences]
    elif name.endswith('.json'):
      texts = [path.read_text('utf-8') for path in (before, after)]
      if repr(json.loads(texts[0])) != repr(json.loads(texts[1])):
        differences.append(f'{name}: other contents')
    elif before.read_bytes() != after.read_bytes():
      differences.append(f'{name}: other bytes')
  return Comparison('tests/golden', len(folders[0]), sorted(differences))


def _data_files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
  """Returns the files of a folder that are not Python, by relative name."""
  return {
    path.relative_to(folder).as_posix(): path
    for path in sorted(folder.rglob('*'))
    if path.is_file() and path.suffix not in ('.py', '.pyc')
  }


def _missing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
  """Returns a text for each name that only one side has."""
  return [f'{name} is in old only' for name in old if name not in new] + [
    f'{name} is in new only' for name in new if name not in old
  ]


def _npz(path: pathlib.Path) -> dict[str, np.ndarray]:
  with np.load(path, allow_pickle=False) as archive:
    return dict(archive)


def _json_lines(path: pathlib.Path) -> list[Any]:
  return [json.loads(line) for line in path.read_text('utf-8').splitlines()]


def _run(checkout: pathlib.Path, *arguments: str) -> None:
  """Runs a command of a checkout.

  Raises:
    SystemExit: with code 2 if the command fails, whose output is printed.
  """
  # -P and PYTHONPATH keep an installed copy of the package from being imported.
  command = [sys.executable, '-P', '-m', 'stppo_jax', *arguments]
  done = subprocess.run(
    command,
    cwd=checkout,
    env=os.environ | {'PYTHONPATH': str(checkout)},
    capture_output=True,
    text=True,
  )
  if done.returncode:
    print(
      f'{checkout}: exit code {done.returncode} of {" ".join(arguments)}\n'
      f'{done.stdout}{done.stderr}',
      file=sys.stderr,
    )
    raise SystemExit(2)


def compare_runs(
  checkouts: Sequence[pathlib.Path],
  algorithm: str,
  *,
  steps: int,
  overrides: Sequence[str] = (),
) -> Iterator[Comparison]:
  """Trains and collects in both checkouts; yields each comparison when done.

  Args:
    checkouts: the old and the new checkout.
    algorithm: the name of the algorithm, with the options of the quickstart.
    steps: the number of steps of each run.
    overrides: further `--config.KEY=VALUE` flags for both runs.
  """
  config = [f'--config=configs/quickstart.py:{algorithm}', *_SMALL, *overrides]
  with tempfile.TemporaryDirectory() as scratch:
    workdirs, batches = [], []
    for side, checkout in zip(('old', 'new'), checkouts, strict=True):
      workdir = pathlib.Path(scratch, side)
      length = [f'--config.num_steps={steps}', f'--workdir={workdir}']
      _run(checkout, 'train', *config, *length)
      workdirs.append(workdir)
    yield compare_metrics(
      *(_json_lines(workdir / 'metrics.jsonl') for workdir in workdirs),
      subject=f'{algorithm}, metrics of {steps} steps',
    )
    yield compare_trajectories(
      *(
        {
          path.name: _json_lines(path)
          for path in sorted(workdir.glob('trajectories-*.jsonl'))
        }
        for workdir in workdirs
      ),
      subject=f'{algorithm}, trajectories',
    )
    for side, checkout in zip(('old', 'new'), checkouts, strict=True):
      out = pathlib.Path(scratch, f'{side}.npz')
      _run(checkout, 'lab', 'collect', *config, f'--out={out}')
      batches.append(_npz(out))
    yield compare_arrays(*batches, subject=f'{algorithm}, arrays of a batch')


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints a line for each comparison; returns the exit code."""
  parser = argparse.ArgumentParser(
    prog='python -m benchmarks.same_numbers',
    description='Compares the numbers that two checkouts compute.',
  )
  parser.add_argument('old', type=pathlib.Path, help='folder of a checkout')
  parser.add_argument('new', type=pathlib.Path, help='folder of a checkout')
  parser.add_argument('--steps', type=int, default=5, help='steps of each run')
  parser.add_argument(
    '--algorithms',
    default='token_ppo,st_ppo,so_grpo',
    help='names of the table, separated by commas; empty: no run',
  )
  parser.add_argument(
    '--override',
    action='append',
    default=[],
    metavar='KEY=VALUE',
    help='a config key of the runs in both checkouts; may be repeated',
  )
  flags = parser.parse_args(arguments)
  checkouts = [flags.old.resolve(), flags.new.resolve()]
  for checkout in checkouts:
    if not (checkout / 'stppo_jax' / '__main__.py').is_file():
      parser.error(f'{checkout}: not a checkout, it has no stppo_jax')
  overrides = [f'--config.{x}' for x in flags.override]
  golden = [checkout / 'tests' / 'golden' for checkout in checkouts]
  comparisons = [compare_golden(*golden)]
  print(comparisons[0], flush=True)
  for algorithm in filter(None, flags.algorithms.split(',')):
    for comparison in compare_runs(
      checkouts, algorithm, steps=flags.steps, overrides=overrides
    ):
      print(comparison, flush=True)
      comparisons.append(comparison)
  differs = any(comparison.differences for comparison in comparisons)
  print('the numbers differ' if differs else 'all numbers are the same')
  return int(differs)


if __name__ == '__main__':
  sys.exit(main())
