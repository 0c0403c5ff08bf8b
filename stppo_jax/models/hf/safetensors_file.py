"""The safetensors format: one file of named tensors, mapped into memory.

    8 bytes   length n of the header, little-endian
    n bytes   JSON: {name: {dtype, shape, data_offsets: [begin, end]}, ...}
    the rest  the tensors, row-major, little-endian, one after another

The source is https://github.com/huggingface/safetensors (its README). A file
is checked by its header and its size, without reading a tensor. Tensors are
views of the mapped file, so that reading a slice reads no more of it.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import json
import math
import pathlib
from typing import Any
from typing import BinaryIO

import ml_dtypes
import numpy as np

DTYPES: Mapping[str, np.dtype] = {
  'F32': np.dtype(np.float32),
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'F16': np.dtype(np.float16),
}
# Bytes per element of the other dtypes of the format, which are not read here.
_OTHERS = {'F64': 8, 'I64': 8, 'U64': 8, 'I32': 4, 'U32': 4, 'I16': 2, 'U16': 2}
_OTHERS |= {'I8': 1, 'U8': 1, 'BOOL': 1, 'F8_E4M3': 1, 'F8_E5M2': 1}
_MAX_HEADER = 100_000_000  # bytes; the limit of the format
_ALIGNMENT = 8  # bytes; where the first tensor may begin


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor of a file.

  Attributes:
    path: the file.
    dtype: name of the dtype in the format, such as 'BF16'.
    shape: sizes of the axes.
    begin: offset of the first byte in the file.
  """

  path: pathlib.Path
  dtype: str
  shape: tuple[int, ...]
  begin: int

  def view(self) -> np.ndarray:
    """Returns the tensor as a read-only view of the mapped file.

    Raises:
      ValueError: the dtype is not in `DTYPES`.
    """
    if self.dtype not in DTYPES:
      raise ValueError(f'{self.path}: dtype {self.dtype} cannot be read')
    return np.memmap(
      self.path,
      DTYPES[self.dtype],
      mode='r',
      offset=self.begin,
      shape=self.shape,
    )


def read_header(path: str | pathlib.Path) -> dict[str, Tensor]:
  """Returns the tensors of a file by name.

  Raises:
    ValueError: it is not a safetensors file, or is damaged; one line that names
      the file and, where sizes differ, the bytes expected and found.
    OSError: the file cannot be read.
  """
  path = pathlib.Path(path)
  size = path.stat().st_size
  with open(path, 'rb') as file:
    length = int.from_bytes(file.read(8), 'little')
    if size < 8 or length > _MAX_HEADER:
      raise ValueError(f'{path}: not a safetensors file')
    if 8 + length > size:
      raise ValueError(
        f'{path}: truncated: expected {8 + length} bytes for the header '
        f'alone, found {size}'
      )
    text = file.read(length)
  try:
    header = json.loads(text)
    header.pop('__metadata__', None)
    tensors = {
      name: _tensor(path, 8 + length, entry) for name, entry in header.items()
    }
  except (
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
    RecursionError,
  ) as error:
    raise ValueError(
      f'{path}: the header is damaged: {" ".join(repr(error).split())}'
    ) from error
  _check_extents(path, 8 + length, size, tensors)
  return tensors


def _tensor(path: pathlib.Path, start: int, entry: dict[str, Any]) -> Tensor:
  shape = tuple(int(size) for size in entry['shape'])
  begin, end = entry['data_offsets']
  tensor = Tensor(path, entry['dtype'], shape, start + int(begin))
  if min(shape, default=0) < 0 or end - begin != _num_bytes(tensor):
    raise ValueError(f'{entry} is inconsistent')
  return tensor


def _num_bytes(tensor: Tensor) -> int:
  dtype = tensor.dtype
  one = DTYPES[dtype].itemsize if dtype in DTYPES else _OTHERS[dtype]
  return one * math.prod(tensor.shape)


def _check_extents(path, start: int, size: int, tensors) -> None:
  """Raises ValueError unless the tensors fill the file without a gap."""
  end = start
  for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
    if tensor.begin != end and _num_bytes(tensor):
      raise ValueError(
        f'{path}: the header is damaged: {name} begins at byte '
        f'{tensor.begin}, expected {end}'
      )
    end = max(end, tensor.begin + _num_bytes(tensor))
  if size != end:
    problem = 'truncated' if size < end else 'too long'
    raise ValueError(f'{path}: {problem}: expected {end} bytes, found {size}')


def write(
  file: BinaryIO,
  shapes: Mapping[str, tuple[int, ...]],
  dtype: str,
  chunks: Iterable[np.ndarray],
) -> None:
  """Writes a file chunk by chunk, with one chunk in memory at a time.

  Args:
    file: a file open for writing.
    shapes: shapes of all tensors by name.
    dtype: dtype of all tensors in the file; a key of `DTYPES`.
    chunks: the values in the order of `shapes`, each a whole tensor or
      consecutive rows of one; they are cast to `dtype`.

  Raises:
    ValueError: there are more or fewer values than `shapes` promises.
  """
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  end = written = 0
  for name, shape in shapes.items():
    begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
    header[name] = {
      'dtype': dtype,
      'shape': list(shape),
      'data_offsets': [begin, end],
    }
  text = json.dumps(header, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % _ALIGNMENT)
  file.write(len(text).to_bytes(8, 'little') + text)
  for chunk in chunks:
    # As bytes, because files do not accept arrays of bfloat16.
    values = np.ascontiguousarray(chunk, DTYPES[dtype])
    written += file.write(values.reshape(-1).view(np.uint8).data)
  if written != end:
    raise ValueError(f'{written} bytes of tensors were written, expected {end}')
