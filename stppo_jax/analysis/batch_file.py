"""Files of frozen rollouts: npz archives, of this program or any other."""

import os
import pathlib
import zipfile
import zlib

import numpy as np

from stppo_jax.analysis import saved_batch

_ZIP = b'PK'  # how every npz file begins
_UNSOUND = (
  ValueError,
  EOFError,
  RuntimeError,  # encrypted, or a compression that zipfile does not know
  zipfile.BadZipFile,
  zlib.error,
)


def load(path: str | pathlib.Path) -> dict[str, np.ndarray]:
  """The arrays of a file that have a name of `frozen.KINDS`, as they are.

  Raises:
    OSError: no such file.
    ValueError: not an npz file, or one without any of them.
  """
  with open(path, 'rb') as file:
    if file.read(len(_ZIP)) != _ZIP:
      raise ValueError('not an npz file')
    file.seek(0)
    try:
      archive = np.load(file, allow_pickle=False)
    except _UNSOUND as error:
      raise ValueError('not a sound npz file: cut off or damaged') from error
    arrays = {
      name: _member(archive, name)
      for name in saved_batch.ARRAY_KINDS
      if name in archive.files
    }
  if not arrays:
    raise ValueError(f'holds none of {", ".join(saved_batch.ARRAY_KINDS)}')
  return arrays


def _member(archive, name: str) -> np.ndarray:
  """One array, or a ValueError in our words: numpy advises to unpickle."""
  problem = f'not a sound npz file: {name} is damaged, or no array of numbers'
  try:
    array = archive[name]
  except _UNSOUND as error:
    raise ValueError(problem) from error
  if not isinstance(array, np.ndarray):  # numpy hands on what it is not
    raise ValueError(problem)
  return array


def load_advantages(
  path: str | pathlib.Path,
  loss_mask_BL: np.ndarray,
  *,
  dtype: type[np.floating],
) -> np.ndarray:
  """The advantages_BL of a file such as `lab advantages` writes.

  Args:
    path: of the file.
    loss_mask_BL: of the rollouts that they are for.
    dtype: of the computation.

  Raises:
    OSError: no such file.
    ValueError: no file of advantages, or not of these rollouts: of another
      shape, or not finite on the loss mask.
  """
  arrays = {**load(path), 'loss_mask_BL': loss_mask_BL}
  readers = dict.fromkeys(('loss_mask_BL', 'advantages_BL'), 'every row')
  return saved_batch.select(arrays, readers, dtype=dtype)['advantages_BL']


def save(path: str | pathlib.Path, arrays: saved_batch.Arrays) -> None:
  """Writes an npz file; killed meanwhile, it leaves the old one or none.

  Raises:
    OSError: it cannot be written.
  """
  path = pathlib.Path(path)
  partial = path.with_name(path.name + '.partial')
  try:
    with open(partial, 'wb') as file:
      np.savez(file, allow_pickle=False, **arrays)
    os.replace(partial, path)
  finally:
    partial.unlink(missing_ok=True)
