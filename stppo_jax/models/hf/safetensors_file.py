"""Reads and writes files of named tensors in the safetensors format.

    8 bytes   length n of the header, little-endian
    n bytes   JSON: {name: {dtype, shape, data_offsets: [begin, end]}, ...}
    the rest  the tensors, row-major, little-endian, one after another

The library `safetensors` reads the files. It checks a file by its header and
its size without reading a tensor, maps the file into memory, and reads only the
requested slices. Its writer needs all tensors of a file in memory at once, but
a file may be larger than the memory of a host. So this module writes files
itself, chunk by chunk.
"""

from collections.abc import Iterable, Mapping
import json
import math
import pathlib
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
import safetensors

DTYPES: Mapping[str, np.dtype] = {
  'F32': np.dtype(np.float32),
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'F16': np.dtype(np.float16),
}
_ALIGNMENT = 8  # bytes; the first tensor begins at a multiple of this number


class Tensor(NamedTuple):
  """Describes a tensor of a file, and reads it.

  Attributes:
    path: the file.
    dtype: name of the dtype in the format, such as 'BF16'.
    shape: sizes of the axes.
    mapped: the tensor in the memory-mapped file; indexing it reads a slice.
  """

  path: pathlib.Path
  dtype: str
  shape: tuple[int, ...]
  mapped: Any

  def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
    """Returns the tensor, or the slice of it at `index`.

    The dtype of the tensor must be in `DTYPES`.
    """
    return self.mapped[index]


def read_header(path: str | pathlib.Path) -> dict[str, Tensor]:
  """Returns the tensors of a file by name, without reading their values.

  Raises:
    ValueError: the file is not a safetensors file, is cut short or is damaged;
      the message is one line and names the file.
    OSError: the file cannot be read.
  """
  path = pathlib.Path(path)
  try:
    file = safetensors.safe_open(path, 'numpy')
  except safetensors.SafetensorError as error:
    reason = ' '.join(str(error).split())
    raise ValueError(f'{path}: cut short or damaged ({reason})') from error
  slices = {name: file.get_slice(name) for name in file.keys()}
  return {
    name: Tensor(path, x.get_dtype(), tuple(x.get_shape()), x)
    for name, x in slices.items()
  }


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
    chunks: the values in the order of `shapes`. Each chunk is a whole tensor or
      consecutive rows of one tensor, and is cast to `dtype`.
  """
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  end = 0
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
    # The array is written as bytes, because `file.write` does not accept
    # arrays of bfloat16.
    values = np.ascontiguousarray(chunk, DTYPES[dtype])
    file.write(values.reshape(-1).view(np.uint8).data)
