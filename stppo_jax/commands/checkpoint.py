"""List the checkpoints of a run, or verify them all; nothing is changed.

python -m stppo_jax checkpoint list DIR
python -m stppo_jax checkpoint verify DIR

  DIR            the folder of the run, also in a bucket; the run may still be
                 in progress
  --workdir=DIR  means the same

list prints a line for each checkpoint: its step, when it was saved, its size,
its score if it was evaluated, and whether it is the newest or the best. It
reads small files only.

verify reads all of them. It computes the fingerprint of every array again, and
compares the digest of the manifest and the id of the run. A line says that a
checkpoint is sound, or names the file or the array that is damaged. The exit
code is 3 if one is damaged, or if the run has saved some and all are gone.
"""

from collections.abc import Sequence

from stppo_jax import settings
from stppo_jax.commands.flags import command_line
from stppo_jax.tools import checkpoints
from stppo_jax.workdir import bucket_files

_ACTIONS = {'list': checkpoints.show, 'verify': checkpoints.verify}


def main(argv: Sequence[str]) -> int:
  """Lists or verifies the checkpoints of a run; returns the exit code."""
  flags = command_line.flags(workdir='')
  words, _, errors = command_line.parse(flags, argv, words=2)
  # The folder is the second word or the value of the flag; '' stands for a word
  # that is missing.
  action, place, *_ = *words, flags.workdir, ''
  if action not in _ACTIONS:
    problem = f'{action}: unknown' if words else 'missing'
    errors.insert(0, problem + settings.closest(action, list(_ACTIONS)))
  if not place:
    errors.append('DIR: missing; give the folder of a run')
  command_line.refuse(errors)
  with bucket_files.downloaded(place, arrays=action == 'verify') as workdir:
    return _ACTIONS[action](workdir, place)
