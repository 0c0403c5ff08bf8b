"""Finds the weight files of a Hugging Face directory: one, or several.

    model.safetensors                   all tensors, or
    model.safetensors.index.json        {weight_map: {tensor: file}, ...} and
    model-00001-of-00002.safetensors    the files that the index names

If a directory has both the single file and the index, the single file is read,
as in `transformers`. The index's metadata (total_size) is ignored, since
writers disagree about it.
"""

from collections.abc import Iterable, Mapping
import json
import pathlib

from stppo_jax import hub
from stppo_jax.models.hf import safetensors_file

SINGLE = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
# Bytes of a slice in float32. A host reads and writes a leaf slice by slice.
SLICE_BYTES = 2**23
_SHOWN = 3  # the most names or problems that an error lists


def read_headers(
  directory: str | pathlib.Path,
) -> dict[str, safetensors_file.Tensor]:
  """Returns all tensors of a directory by name, without reading their values.

  Raises:
    ValueError: there are no weights, a file is damaged, or the index does not
      fit its files; the message is one line.
  """
  place, directory = directory, hub.local_folder(directory)
  index = directory / INDEX
  weight_map = read_index(index) if index.is_file() else {}
  if hub.is_name(place):
    files = sorted(set(weight_map.values())) or [SINGLE]
    directory = hub.local_folder(place, files)
  if (directory / SINGLE).is_file():
    return safetensors_file.read_header(directory / SINGLE)
  if not weight_map:
    # A Hub model is never searched for pytorch_model.bin, but may have this
    # file, so the advice is always given for such a model.
    advice = (
      f'; python -m stppo_jax checkpoint convert {place} --out=DIR converts '
      'pytorch_model.bin to safetensors'
      if hub.is_name(place) or any(directory.glob('pytorch_model*.bin'))
      else ''
    )
    raise ValueError(f'no {SINGLE} and no {INDEX} in {place}{advice}')
  tensors = {}
  for file in sorted(set(weight_map.values())):
    if not (directory / file).is_file():
      raise ValueError(f'{index}: names {file}, but there is no such file')
    there = safetensors_file.read_header(directory / file)
    promised = {name for name, where in weight_map.items() if where == file}
    for problem, names in (
      ('lacks tensors that the index places in it', promised - there.keys()),
      (
        'has tensors that the index does not place in it',
        there.keys() - promised,
      ),
    ):
      if names:
        raise ValueError(f'{directory / file}: {problem}: {shortened(names)}')
    tensors |= there
  return tensors


def read_index(index: pathlib.Path) -> Mapping[str, str]:
  """Returns tensor name -> name of the tensor's file in the same directory.

  Raises:
    ValueError: the index is not JSON, names no files, or names a file outside
      of its directory; the message is one line.
  """
  content = read_json(index)
  weight_map = content.get('weight_map')
  if not isinstance(weight_map, dict) or not weight_map:
    raise ValueError(f'{index}: no weight_map')
  for file in weight_map.values():
    # An index is untrusted input: its names must not lead out of its directory.
    if not isinstance(file, str) or pathlib.PurePath(file).name != file:
      raise ValueError(f'{index}: {file!r} is not a file name')
  return weight_map


def read_json(path: pathlib.Path) -> dict:
  """Returns the object in a JSON file.

  Raises:
    ValueError: the file is not JSON or holds no object; the message is one
      line.
  """
  try:
    content = json.loads(path.read_text(encoding='utf-8'))
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path}: not JSON: {error}') from error
  if not isinstance(content, dict):
    raise ValueError(f'{path}: expected an object, found {content!r:.40}')
  return content


def shortened(names: Iterable[str]) -> str:
  """Returns a text with the first few names, and the number of other names."""
  names = sorted(names)
  text = ', '.join(names[:_SHOWN])
  more = len(names) - _SHOWN
  return f'{text} and {more} more' if more > 0 else text
