"""List the checkpoints of a run, or verify them; or convert pickled weights.

python -m stppo_jax checkpoint list DIR
python -m stppo_jax checkpoint verify DIR
python -m stppo_jax checkpoint convert MODEL --out=NEW

  DIR            the folder of the run, also in a bucket; the run may still be
                 in progress
  --workdir=DIR  means the same
  MODEL          a Hugging Face directory, or the name of a model of the Hub
  --out=NEW      a new folder, for the converted model

list prints a line for each checkpoint: its step, when it was saved, its size,
its score if it was evaluated, and whether it is the newest or the best. The
command reads small files only.

verify reads all files of the checkpoints. It computes the fingerprint of every
array again, and compares the digest of the manifest and the id of the run. For
each checkpoint, a line says that it is sound, or names the file or the array
that is damaged. The exit code is 3 if a checkpoint is damaged, or if the run
has saved checkpoints and all of them are gone.

convert reads the weights in pytorch_model*.bin, or adapter_model.bin, of a
Hugging Face directory or of a model of the Hub, and writes them as safetensors
to a new folder, with the other files of the model. It reads only the weights in
a file, and never runs code that the file may hold. It needs PyTorch (the extra
`torch`).
"""

from collections.abc import Sequence
import pathlib

from stppo_jax import settings
from stppo_jax.commands.flags import command_line
from stppo_jax.tools import checkpoints
from stppo_jax.tools import torch_files
from stppo_jax.workdir import bucket_files

_CONVERT = 'convert'
_ACTIONS = {'list': checkpoints.show, 'verify': checkpoints.verify}


def main(argv: Sequence[str]) -> int:
  """Lists or verifies checkpoints, or converts; returns the exit code."""
  flags = command_line.flags(workdir='', out='')
  words, _, errors = command_line.parse(flags, argv, words=2)
  # `place` is the second word, or else the value of --workdir, or else ''. If
  # there is no word at all, the command ends with an error below.
  action, place, *_ = *words, flags.workdir, ''
  choices = [*_ACTIONS, _CONVERT]
  if action not in choices:
    problem = f'{action}: unknown' if words else 'missing'
    errors.insert(0, problem + settings.closest(action, choices))
  if action == _CONVERT:
    given = {'MODEL': place, '--out': flags.out}
    if missing := [name for name, value in given.items() if not value]:
      errors.append(f'{", ".join(missing)}: missing')
  elif not place:
    errors.append('DIR: missing; give the folder of a run')
  if action in _ACTIONS and flags.out:
    errors.append(f'--out={flags.out}: is for convert only')
  command_line.refuse(errors)
  if action == _CONVERT:
    return torch_files.convert(place, pathlib.Path(flags.out))
  with bucket_files.downloaded(place, arrays=action == 'verify') as workdir:
    return _ACTIONS[action](workdir, place)
