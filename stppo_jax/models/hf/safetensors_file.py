"""Files of named tensors in the safetensors format.

    8 bytes   length n of the header, little-endian
    n bytes   JSON: {name: {dtype, shape, data_offsets: [begin, end]}, ...}
    the rest  the tensors, row-major, little-endian, one after another

The library `safetensors` reads them. A file is checked by its header and its
size, without reading a tensor. It is mapped into memory, and reading a slice
reads no more of it. The library writes whole tensors only, so writing chunk by
chunk is done here.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import json
import math
import pathlib
from typing import Any
from typing import BinaryIO
from typing import NamedTuple

import ml_dtypes
import numpy as np
import safetensors

DTYPES: Mapping[str, np.dtype] = {
  'F32': np.dtype(np.float32),
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'F16': np.dtype(np.float16),
}
_MAX_HEADER = 100_000_000  # bytes; the limit of the format
_ALIGNMENT = 8  # bytes; where the first tensor may begin


class Tensor(NamedTuple):
  """A tensor of a file.

  Attributes:
    path: the file.
    dtype: name of the dtype in the format, such as 'BF16'.
    shape: sizes of the axes.
    mapped: the tensor in the mapped file; indexing it reads.
  """

  path: pathlib.Path
  dtype: str
  shape: tuple[int, ...]
  mapped: Any

  def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
    """Returns the tensor or a slice of it.

    Raises:
      ValueError: the dtype is not in `DTYPES`.
    """
    if self.dtype not in DTYPES:
      raise ValueError(f'{self.path}: dtype {self.dtype} cannot be read')
    return self.mapped[index]


def read_header(path: str | pathlib.Path) -> dict[str, Tensor]:
  """Returns the tensors of a file by name.

  Raises:
    ValueError: it is not a safetensors file, or is damaged; one line that names
      the file and, where sizes differ, the bytes expected and found.
    OSError: the file cannot be read.
  """
  path = pathlib.Path(path)
  try:
    file = safetensors.safe_open(path, 'numpy')
  except safetensors.SafetensorError as error:
    reason = ' '.join(str(error).split())
    raise ValueError(f'{path}: {_problem(path)} ({reason})') from error
  slices = {name: file.get_slice(name) for name in file.keys()}
  return {
    name: Tensor(path, x.get_dtype(), tuple(x.get_shape()), x)
    for name, x in slices.items()
  }


def _problem(path: pathlib.Path) -> str:
  """Returns what is wrong with a file that the library refuses.

  The library does not tell the sizes, which show whether a download is
  complete.
  """
  size = path.stat().st_size
  with open(path, 'rb') as file:
    length = int.from_bytes(file.read(8), 'little')
    if size < 8 or length > _MAX_HEADER:
      return 'not a safetensors file'
    text = file.read(length)
  expected = 8 + length
  if expected <= size:
    try:
      entries = json.loads(text)
      entries.pop('__metadata__', None)
      expected += max(entry['data_offsets'][1] for entry in entries.values())
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
      return 'the header is damaged'
  if size == expected:
    return 'the header is damaged'
  problem = 'truncated' if size < expected else 'too long'
  return f'{problem}: expected {expected} bytes, found {size}'


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
