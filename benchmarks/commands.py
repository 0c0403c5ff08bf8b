"""Measures the CPU time of quick commands: a bad config, `status`, `config`.

    python -m benchmarks.commands

Each command is a process of its own, whose time includes the start of Python.
There is a bad config of every kind: an unknown key, a wrong type, a broken rule
about one key, a broken rule about several keys, a bad algorithm, a missing
file, and missing devices. The runs that `status` reads are made up.
"""

from collections.abc import Sequence
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from benchmarks import made_runs
from benchmarks import measure

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_CONFIG = '--config=configs/quickstart.py'
_BAD = (
  'rollout.temprature=0.7',
  'num_steps=ten',
  'rollout.top_p=1.5',
  'updates.minibatch_size=7',
  'algorithm.bounds.name=loose',
  'model.path=/no/such',
  'mesh.data=1000000',
)
_REFUSED, _STATUS = 2.0, 1.0  # the goals, in seconds


def seconds(arguments: Sequence[str], *, exit_code: int, repeats: int) -> float:
  """Returns the median CPU time of a command, in seconds.

  Raises:
    RuntimeError: if the command ends with another exit code than `exit_code`.
  """
  found = []
  for _ in range(repeats):
    before = sum(os.times()[2:4])  # CPU seconds of children
    done = subprocess.run(
      [sys.executable, '-m', 'stppo_jax', *arguments],
      cwd=_ROOT,
      capture_output=True,
      text=True,
    )
    if done.returncode != exit_code:
      raise RuntimeError(f'{arguments}: {done.returncode}: {done.stderr}')
    found.append(sum(os.times()[2:4]) - before)
  return statistics.median(found)


def report(
  folder: pathlib.Path, *, bad: Sequence[str], runs: int, repeats: int
) -> str:
  """Returns the table of the commands.

  Args:
    folder: the folder in which made-up runs are written.
    bad: the KEY=VALUE pairs with which a config is refused, one at a time.
    runs: the number of runs that `status` reads.
    repeats: how often each command is run.
  """
  rows = []
  for change in bad:
    flag = f'--config.{change}'
    words = ['train', _CONFIG, flag, f'--workdir={folder / "none"}']
    took = seconds(words, exit_code=2, repeats=repeats)
    rows.append((f'train {flag}', f'{took:.2f}', f'{_REFUSED:g}'))
  folders = [
    made_runs.make(folder / str(n), seed=n, steps=100, dialogues=1, detailed=0)
    for n in range(runs)
  ]
  took = seconds(['status', *map(str, folders)], exit_code=0, repeats=repeats)
  rows.append((f'status of {runs} runs', f'{took:.2f}', f'{_STATUS:g}'))
  took = seconds(['config', _CONFIG], exit_code=0, repeats=repeats)
  rows.append(('config', f'{took:.2f}', ''))
  return measure.table(('command', 'CPU seconds', 'goal'), rows)


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints what was measured, and on which machine."""
  flags = measure.start(
    measure.parser('commands', runs=50, repeats=3), arguments
  )
  with tempfile.TemporaryDirectory() as folder:
    print(
      report(
        pathlib.Path(folder), bad=_BAD, runs=flags.runs, repeats=flags.repeats
      )
    )


if __name__ == '__main__':
  main()
