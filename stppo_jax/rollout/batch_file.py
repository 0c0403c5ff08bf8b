"""Reads and writes npz files of arrays, such as the batch of a step."""

from collections.abc import Iterable, Mapping
import os
import pathlib
from typing import BinaryIO
import zipfile

import numpy as np

# The first bytes of every npz file.
_ZIP_MAGIC = b'PK'
# The most bytes to which the compressed arrays of a file may unpack together.
# Without this limit, a file of a few MiB could fill the memory.
_MAX_UNPACKED = 4 << 30


def read(file: BinaryIO, names: Iterable[str]) -> dict[str, np.ndarray]:
  """Returns the named arrays of an open npz file.

  Names that the file does not have are left out.

  Raises:
    ValueError: if the file is not an npz file, is damaged, or takes too much
      memory. The message is one line, without the name of the file.
  """
  if file.read(len(_ZIP_MAGIC)) != _ZIP_MAGIC:
    raise ValueError('not an npz file')
  file.seek(0)
  try:
    archive = np.load(file, allow_pickle=False)
  except Exception as error:  # numpy raises exceptions of many classes
    raise ValueError('not a sound npz file: cut off or damaged') from error
  present = [name for name in names if name in archive.files]
  files = {name for array in present for name in (array, f'{array}.npy')}
  # The sum of `file_size` is a safe bound, because zipfile unpacks no more of a
  # member than the member's `file_size`.
  unpacked = sum(
    member.file_size
    for member in archive.zip.infolist()
    if member.filename in files and member.compress_type != zipfile.ZIP_STORED
  )
  if unpacked > _MAX_UNPACKED:
    raise ValueError(
      f'its compressed arrays take {unpacked} bytes in memory: must be at most '
      f'{_MAX_UNPACKED}; arrays that are not compressed may be larger'
    )
  return {name: _member(archive, name) for name in present}


def _member(archive, name: str) -> np.ndarray:
  """Returns one array of an archive.

  Raises:
    ValueError: if the member with this name is damaged, or is no array of
      numbers. (The message of numpy would recommend unpickling the member,
      which is unsafe.)
  """
  problem = f'not a sound npz file: {name} is damaged, or no array of numbers'
  try:
    array = archive[name]
  except Exception as error:  # numpy raises exceptions of many classes
    raise ValueError(problem) from error
  # numpy returns the bytes of a member that does not begin like an array.
  if not isinstance(array, np.ndarray):
    raise ValueError(problem)
  return array


def save(path: str | pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
  """Writes an npz file atomically.

  If the call is interrupted, an older file at the path remains as it was.

  Raises:
    OSError: if the file cannot be written.
  """
  path = pathlib.Path(path)
  partial = path.with_name(path.name + '.partial')
  try:
    with open(partial, 'wb') as file:
      np.savez(file, allow_pickle=False, **arrays)
    os.replace(partial, path)
  finally:
    partial.unlink(missing_ok=True)
