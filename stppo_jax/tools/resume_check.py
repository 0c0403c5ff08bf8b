"""Checks that a run that was stopped and resumed ends with the same bits.

    WORKDIR/whole    the run in one piece
           /cut      the run that ends after some steps, and is resumed

Each piece is a process of its own, as it would be after a preemption. Then the
fingerprints of all arrays of the last checkpoints are compared.
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
  """A checkpoint is missing or damaged."""

  exit_code = exits.DAMAGED


def verify(
  flags: Sequence[str],
  workdir: pathlib.Path,
  *,
  after: int,
  num_steps: int,
  is_alone: bool,
) -> int:
  """Makes a run in one piece and in two, and compares their ends.

  Args:
    flags: flags of the command `train`; of repeated ones the last counts.
    workdir: the folder of both runs.
    after: the steps after which the second run is cut.
    num_steps: the length of the runs.
    is_alone: whether the flags ask for one machine, and for no restart.

  Returns:
    The exit code: 0 they are equal, 3 they differ, or that of a run that has
    not come to its end.

  Raises:
    Misconfigured: the flags allow no comparison.
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
  # Otherwise each piece would verify itself, and so on.
  flags = _without_verifying(flags)
  whole, cut = workdir / 'whole', workdir / 'cut'
  # The second run is cut by its length and not by a signal, so that the cut is
  # always after the same step.
  for folder, steps in ((whole, num_steps), (cut, after), (cut, num_steps)):
    print(f'--- {folder}: to step {steps}', flush=True)
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
  """Returns the flags without `--verify_resume`, whose value may follow it."""
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
  """Compares the checkpoints of a step of two runs by their fingerprints.

  Returns:
    A line for each array, or value of the host, that differs; and the number of
    arrays.

  Raises:
    NothingToCompare: a checkpoint is missing or damaged.
  """
  ours, theirs = (_manifest(folder, step) for folder in (one, other))
  lines = []
  for name in sorted(ours['leaves'].keys() | theirs['leaves'].keys()):
    if ours['leaves'].get(name) != theirs['leaves'].get(name):
      lines.append(f'step {step}: {name} differs')
  # `line` holds the metrics of the step, with its times, which no two runs
  # share.
  for name in sorted(ours['host'].keys() & theirs['host'].keys() - {'line'}):
    if ours['host'][name] != theirs['host'][name]:
      lines.append(
        f'step {step}: {name} is {ours["host"][name]} in one piece, and '
        f'{theirs["host"][name]} if it is cut'
      )
  return lines, len(ours['leaves'])


def _manifest(folder: pathlib.Path, step: int) -> dict[str, Any]:
  path = folder / 'checkpoints' / str(step)
  try:
    return manifest_lib.read(path, step)
  except ValueError as error:
    raise NothingToCompare(f'{path}: {error}') from error


def _train(flags: Sequence[str]) -> int:
  """Runs `train` as a process; ends it if this one is interrupted."""
  command = [sys.executable, '-m', 'stppo_jax', 'train', *flags]
  process = subprocess.Popen(command)
  try:
    return process.wait()
  except BaseException:
    process.terminate()
    process.wait()
    raise
