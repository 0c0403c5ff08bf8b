"""Reads and writes the npz files of saved batches."""

from collections.abc import Iterable
import os
import pathlib
from typing import BinaryIO
import zipfile

import numpy as np

from stppo_jax.tools.lab import saved_batch

_ZIP_MAGIC = b'PK'  # the first bytes of every npz file
# Bytes that the compressed arrays of a file may take together. A file of a few
# MiB can otherwise fill the memory.
_MAX_UNPACKED = 4 << 30


def load(path: str | pathlib.Path) -> dict[str, np.ndarray]:
  """Returns the arrays of a file that `saved_batch.ARRAY_KINDS` lists.

  Raises:
    OSError: there is no such file.
    ValueError: it is not an npz file, or has none of these arrays.
  """
  with open(path, 'rb') as file:
    arrays = read(file, saved_batch.ARRAY_KINDS)
  if not arrays:
    names = ', '.join(saved_batch.ARRAY_KINDS)
    raise ValueError(f'has no array of these names: {names}')
  return arrays


def read(file: BinaryIO, names: Iterable[str]) -> dict[str, np.ndarray]:
  """Returns the arrays of an open npz file that have one of the names.

  Raises:
    ValueError: it is not an npz file, is damaged, or takes too much memory;
      one line without the name of the file.
  """
  if file.read(len(_ZIP_MAGIC)) != _ZIP_MAGIC:
    raise ValueError('not an npz file')
  file.seek(0)
  try:
    archive = np.load(file, allow_pickle=False)
  except Exception as error:  # Numpy raises any, for what is damaged.
    raise ValueError('not a sound npz file: cut off or damaged') from error
  present = [name for name in names if name in archive.files]
  files = {name for array in present for name in (array, f'{array}.npy')}
  # zipfile unpacks no more of a member than the size that is stated here.
  unpacked = sum(
    member.file_size
    for member in archive.zip.infolist()
    if member.filename in files and member.compress_type != zipfile.ZIP_STORED
  )
  if unpacked > _MAX_UNPACKED:
    raise ValueError(
      f'its compressed arrays take {unpacked} bytes; the most is '
      f'{_MAX_UNPACKED}, and arrays that are not compressed may be larger'
    )
  return {name: _member(archive, name) for name in present}


def _member(archive, name: str) -> np.ndarray:
  """Returns one array of an archive.

  Raises:
    ValueError: it is no array of numbers. (The message of numpy itself would
      recommend to unpickle it, which is unsafe.)
  """
  problem = f'not a sound npz file: {name} is damaged, or no array of numbers'
  try:
    array = archive[name]
  except Exception as error:  # Numpy raises any, for what is damaged.
    raise ValueError(problem) from error
  if not isinstance(array, np.ndarray):  # numpy returns other members as bytes
    raise ValueError(problem)
  return array


def load_advantages(
  path: str | pathlib.Path,
  loss_mask_BL: np.ndarray,
  *,
  dtype: type[np.floating],
) -> np.ndarray:
  """Returns advantages_BL of a file such as `lab advantages` writes.

  Args:
    path: the path of the file.
    loss_mask_BL: the loss mask of the saved batch that the advantages are for.
    dtype: the dtype of the computation.

  Raises:
    OSError: there is no such file.
    ValueError: it has no advantages, or advantages that do not fit the batch:
      of another shape, or not finite on the loss mask.
  """
  arrays = {**load(path), 'loss_mask_BL': loss_mask_BL}
  readers = {
    name: 'every algorithm' for name in ('loss_mask_BL', 'advantages_BL')
  }
  return saved_batch.select(arrays, readers, dtype=dtype)['advantages_BL']


def save(path: str | pathlib.Path, arrays: saved_batch.Arrays) -> None:
  """Writes an npz file; an interrupted call leaves the old file, or none.

  Raises:
    OSError: the file cannot be written.
  """
  path = pathlib.Path(path)
  partial = path.with_name(path.name + '.partial')
  try:
    with open(partial, 'wb') as file:
      np.savez(file, allow_pickle=False, **arrays)
    os.replace(partial, path)
  finally:
    partial.unlink(missing_ok=True)
