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
import sys

from stppo_jax import exits
from stppo_jax import settings
from stppo_jax.commands.flags import recorded_config


def main(argv: Sequence[str]) -> int:
  """Repeats an update; returns the exit code."""
  flags = [word for word in argv if word.startswith('-')]
  problems = [
    f'{flag}: unknown flag{settings.closest(flag, ["--help"])}'
    for flag in flags
  ]
  if len(argv) - len(flags) != 1:
    problems.append('DIR: give one dump, such as WORKDIR/crash/step_12')
  elif not pathlib.Path(argv[0]).is_dir():
    problems.append(f'{argv[0]}: no such folder')
  if problems:
    print('\n'.join(problems), file=sys.stderr)
    return exits.USAGE
  folder = pathlib.Path(argv[0])
  try:
    config = recorded_config.read(folder)
  except ValueError as error:
    print(f'{folder}: {error}', file=sys.stderr)
    return exits.USAGE
  # Imported late: a wrong flag is answered before jax is loaded.
  import jax

  # The devices may belong to another run.
  jax.config.update('jax_platforms', 'cpu')
  from stppo_jax.tools import replay

  if replay.replay(config, folder):
    print('reproduced: the update is skipped here, too')
    return 0
  print('not reproduced: the update is sound here')
  return exits.NOT_REPRODUCED
