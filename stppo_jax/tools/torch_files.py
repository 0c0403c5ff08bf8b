"""Converts the weights in files of PyTorch to files of safetensors."""

from collections.abc import Mapping
import fnmatch
import json
import pathlib
import shutil

from stppo_jax import exits
from stppo_jax import hub
from stppo_jax.models.hf import weight_files

_PICKLED = 'pytorch_model*.bin', 'adapter_model.bin'
_INDEX = 'pytorch_model.bin.index.json'


def convert(place: str, out: pathlib.Path) -> int:
  """Writes the weights of a model as safetensors; returns the exit code.

  Args:
    place: a Hugging Face directory, or the name of a model on the Hugging Face
      Hub.
    out: a folder that is new or empty.

  Raises:
    Misconfigured: there are no weights in files of PyTorch, a file holds other
      data than weights, PyTorch is not installed, or `out` is not empty. In
      each case `out` stays as it was.
  """
  if out.exists() and not (out.is_dir() and not any(out.iterdir())):
    raise exits.Misconfigured(f'--out={out}: must be a new or an empty folder')
  if not hub.is_name(place):
    # This check comes before the import of PyTorch: nobody should have to
    # install PyTorch to learn that there is nothing to convert.
    _pickled(place, hub.local_folder(place))
  try:
    import safetensors.torch
    import torch  # pyright: ignore[reportMissingImports]
  except ImportError as error:
    raise exits.Misconfigured(
      "checkpoint convert: needs PyTorch: pip install '.[torch]' in the clone"
    ) from error
  folder = hub.local_folder(place, (*hub.SMALL, *_PICKLED))
  pickled = _pickled(place, folder)
  # `export` imports jax, so it is imported only after the quick checks.
  from stppo_jax.models.hf import export

  files: Mapping[str, str] = {}
  if (folder / _INDEX).is_file():
    with exits.as_misconfigured():
      files = weight_files.read_index(folder / _INDEX)
  with export.replace_dir(out, ours=lambda name: False) as partial:
    for name in pickled:
      try:
        # With `weights_only`, torch unpickles tensors and runs no other code
        # from the file.
        tensors = torch.load(
          folder / name, map_location='cpu', weights_only=True
        )
        # Tensors are cloned, because safetensors cannot save tensors that share
        # memory.
        tensors = {key: x.clone().contiguous() for key, x in tensors.items()}
      except Exception as error:  # a damaged file can raise any error
        reason = str(error).partition('\n')[0]
        raise exits.Misconfigured(
          f'{place}: {name} holds something other than weights, or is '
          f'damaged ({reason})'
        ) from error
      path = partial / _renamed(name)
      safetensors.torch.save_file(tensors, path, {'format': 'pt'})
    for path in sorted(folder.iterdir()):
      if path.name == _INDEX:
        index = weight_files.read_json(path)
        index['weight_map'] = {key: _renamed(x) for key, x in files.items()}
        (partial / weight_files.INDEX).write_text(json.dumps(index, indent=2))
      elif any(fnmatch.fnmatch(path.name, pattern) for pattern in hub.SMALL):
        shutil.copyfile(path, partial / path.name)
  print(f'{out}: {len(pickled)} file{"s" * (len(pickled) > 1)} converted')
  return 0


def _pickled(place: str, folder: pathlib.Path) -> list[str]:
  """Returns the sorted names of a folder's weight files of PyTorch.

  Raises:
    Misconfigured: the folder is missing or has no such file.
  """
  names = (x.name for pattern in _PICKLED for x in folder.glob(pattern))
  if found := sorted(names):
    return found
  if not folder.is_dir():
    raise exits.Misconfigured(f'{place}: {hub.not_here(place)}')
  already = any(folder.glob('*.safetensors'))
  reason = '; its weights are safetensors already' if already else ''
  raise exits.Misconfigured(f'{place}: no pytorch_model.bin to convert{reason}')


def _renamed(name: str) -> str:
  """Returns the safetensors name for the name of a weight file of PyTorch."""
  return name.replace('pytorch_', '').replace('.bin', '.safetensors')
