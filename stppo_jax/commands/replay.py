"""Repeat on a CPU an update that was skipped and ended a run.

python -m stppo_jax replay DIR

  DIR     the dump of the update, WORKDIR/crash/step_N
  --help  prints this text

A run that ends with exit code 76 because too many updates were skipped leaves
a checkpoint with the state before the last of them and such a dump, unless a
sound update followed in the same step. The command makes the update again on
one CPU device, and prints what is not finite in the batch and in the state, and
each metric of the update, here and in the run.

The exit code is 0 if the update is skipped here too, and 1 if it is not.
Then the cause is probably not in the numbers, but in the accelerator, its
compiler or its memory, or in rounding, which differs between devices.
"""

from collections.abc import Sequence
import pathlib

from stppo_jax.commands.flags import command_line


def main(argv: Sequence[str]) -> int:
  """Repeats an update; returns the exit code."""
  given = command_line.parse(
    command_line.flags(),
    argv,
    words=1,
    missing='DIR: missing; give a dump, such as WORKDIR/crash/step_12',
  )
  folder = pathlib.Path(*given.words)
  if not folder.is_dir():
    given.errors.append(f'{folder}: no such folder')
  command_line.refuse(given.errors)
  # Imported late: a wrong flag is answered before jax is loaded.
  import jax

  # The devices may belong to another run.
  jax.config.update('jax_platforms', 'cpu')
  from stppo_jax.tools import replay

  return replay.replay(folder)
