"""Checks that a run ends with the same arrays if it is stopped and resumed.

    WORKDIR/whole    a run in one piece
           /cut      the same run, which is stopped after some steps and resumed

Each piece of a run is a process of its own, as after a preemption. At the end,
the fingerprints of all arrays in the last checkpoints of both runs are
compared.
"""

from collections.abc import Sequence
import pathlib
import subprocess
import sys
from typing import Any

from stppo_jax import exits
from stppo_jax.records.checkpoints import manifest as manifest_lib
from stppo_jax.workdir import run_folder

COMMAND = 'train --verify_resume'


class NothingToCompare(Exception):
  """The error of a checkpoint that is missing or damaged."""

  exit_code = exits.DAMAGED


def verify(
  flags: Sequence[str],
  workdir: pathlib.Path,
  *,
  after: int,
  num_steps: int,
  is_alone: bool,
) -> int:
  """Trains in one piece and in two pieces, and compares the last checkpoints.

  Args:
    flags: flags of the command `train`. If a flag is repeated, its last value
      counts.
    workdir: the folder in which the folders of both runs are made.
    after: the number of steps after which the second run is stopped.
    num_steps: the number of steps of both runs.
    is_alone: whether the flags ask for one machine, and do not ask for a
      restart.

  Returns:
    The exit code: 0 if the checkpoints are equal and 3 if they differ. If
    `train` ends with another exit code than 0, this code is returned.

  Raises:
    Misconfigured: `after` is out of range, or `is_alone` is false.
  """
  errors = []
  if not 0 < after < num_steps:
    errors.append(
      f'--verify_resume={after}: must be greater than 0 and less than '
      f'num_steps={num_steps}'
    )
  if not is_alone:
    errors.append(
      '--verify_resume: needs one machine and no --restart; use a new folder'
    )
  if errors:
    raise exits.Misconfigured('\n'.join(errors))
  workdir.mkdir(parents=True, exist_ok=True)
  run_folder.mark(workdir, COMMAND)
  # With --verify_resume, each piece would start two further runs.
  flags = _without_verifying(flags)
  whole, cut = workdir / 'whole', workdir / 'cut'
  # The second run is stopped by its length and not by a signal, so that it
  # always stops after the same step.
  for folder, steps in ((whole, num_steps), (cut, after), (cut, num_steps)):
    print(f'--- {folder}: trains to step {steps}', flush=True)
    length = f'--config.num_steps={steps}'
    code = _train([*flags, f'--workdir={folder}', length])
    if code:
      print(f'{folder}: ended with exit code {code}; nothing was compared')
      return code
  lines, count = differences(whole, cut, num_steps)
  for line in lines:
    print(f'WRONG  {line}')
  pieces = f'{after} + {num_steps - after} steps against {num_steps}'
  if not lines:
    print(f'ok     {pieces}: {count} arrays, all of them equal in every bit')
  return exits.DAMAGED if lines else 0


def _without_verifying(flags: Sequence[str]) -> list[str]:
  """Returns the flags without `--verify_resume` and its value."""
  left, words = [], iter(flags)
  for word in words:
    name, equals, _ = word.lstrip('-').partition('=')
    if name != 'verify_resume' or word == name:
      left.append(word)
    elif not equals:
      next(words, None)
  return left


def differences(
  one: pathlib.Path, other: pathlib.Path, step: int
) -> tuple[list[str], int]:
  """Compares the checkpoints of two runs after the same step.

  Arrays are compared by their fingerprints.

  Returns:
    A line for each array that differs and for each recorded value of the host
    that differs, and the number of arrays.

  Raises:
    NothingToCompare: a checkpoint is missing or damaged.
  """
  ours, theirs = (_manifest(folder, step) for folder in (one, other))
  lines = []
  for name in sorted(ours['leaves'].keys() | theirs['leaves'].keys()):
    if ours['leaves'].get(name) != theirs['leaves'].get(name):
      lines.append(f'step {step}: {name} differs')
  # `line` holds the metrics of the step. It is left out, because it has times,
  # which differ between any two runs.
  for name in sorted(ours['host'].keys() & theirs['host'].keys() - {'line'}):
    if ours['host'][name] != theirs['host'][name]:
      lines.append(
        f'step {step}: {name} is {ours["host"][name]} if the run is in one '
        f'piece, and {theirs["host"][name]} if it is cut'
      )
  return lines, len(ours['leaves'])


def _manifest(folder: pathlib.Path, step: int) -> dict[str, Any]:
  path = folder / 'checkpoints' / str(step)
  try:
    return manifest_lib.read(path, step)
  except ValueError as error:
    raise NothingToCompare(f'{path}: {error}') from error


def _train(flags: Sequence[str]) -> int:
  """Runs `train` as a process, and returns its exit code.

  If this process is interrupted, the process of `train` is ended too.
  """
  command = [sys.executable, '-m', 'stppo_jax', 'train', *flags]
  process = subprocess.Popen(command)
  try:
    return process.wait()
  except BaseException:
    process.terminate()
    process.wait()
    raise
