"""Frozen rollouts: the arrays of one collection, in a file.

B trajectories, L tokens. An npz file whose arrays have the names, axes and
meanings of `batch.TokenBatch`, but for these three of the policy and the value
model after some updates, and the fourth, which a `TokenBatch` calls values_BL:

  logprobs_BL    log pi_theta
  entropy_BL     of pi_theta at each token, nats
  values_BL      V of the updated value model
  old_values_BL  V before the first update

Such a file need not be ours: any origin will do, with the arrays a command
reads and no others. What stands off the loss mask has no meaning and may be
anything. Arrays of other names are passed over.
"""

from collections.abc import Collection
from collections.abc import Mapping
import os
import pathlib
import typing
import zipfile
import zlib

import numpy as np

from stppo_jax import batch as batch_lib

Arrays = Mapping[str, np.ndarray]


class Kind(typing.NamedTuple):
  """What an array may hold.

  Attributes:
    words: for a person.
    codes: numpy's kinds of such a dtype.
  """

  words: str
  codes: str


_IDS = Kind('integers', 'iu')
_MASK = Kind('booleans, or 0 and 1', 'biu')
_REALS = Kind('real numbers', 'fiu')

# The name says the axes.
KINDS: Mapping[str, Kind] = {
  'tokens_BL': _IDS,
  'lengths_B': _IDS,
  'turn_ids_BL': _IDS,
  'loss_mask_BL': _MASK,
  'sentence_ids_BL': _IDS,
  'state_ids_BL': _IDS,
  'group_ids_B': _IDS,
  'sampler_logprobs_BL': _REALS,
  'old_logprobs_BL': _REALS,
  'ref_logprobs_BL': _REALS,
  'logprobs_BL': _REALS,
  'entropy_BL': _REALS,
  'rewards_BL': _REALS,
  'values_BL': _REALS,
  'old_values_BL': _REALS,
  'advantages_BL': _REALS,
  'returns_BL': _REALS,
  'value_mask_BL': _MASK,
}
# Numbered through the row from 1, so that no id is above L.
_NUMBERED = ('turn_ids_BL', 'sentence_ids_BL')


def load(path: str | pathlib.Path) -> dict[str, np.ndarray]:
  """The arrays of a file that have a name of `KINDS`, as they are.

  Raises:
    OSError: no such file.
    ValueError: not an npz file, or shapes that do not fit together.
  """
  with open(path, 'rb') as file:
    try:
      archive = np.load(file, allow_pickle=False)
      if not isinstance(archive, np.lib.npyio.NpzFile):
        raise ValueError('a single array')
      arrays = {name: archive[name] for name in KINDS if name in archive.files}
      for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # numpy hands on what it is not
          raise ValueError(f'{name} is not an array')
    except (
      ValueError,
      EOFError,
      RuntimeError,  # encrypted, or a compression that zipfile does not know
      zipfile.BadZipFile,
      zlib.error,
    ) as error:
      reason = ' '.join(str(error).split())
      raise ValueError(f'not a sound npz file ({reason})') from error
  _check_shapes(arrays)
  return arrays


def _check_shapes(arrays: Arrays) -> None:
  """Raises ValueError, a line for each array of another shape."""
  standard = next((name for name in arrays if name.endswith('_BL')), None)
  if standard is None:
    raise ValueError(f'holds none of {", ".join(KINDS)}')
  if 'loss_mask_BL' in arrays:
    standard = 'loss_mask_BL'
  shape = arrays[standard].shape
  if len(shape) != 2:
    raise ValueError(f'{standard} has shape {shape}, expected [B, L]')
  lines = []
  for name, array in arrays.items():
    expected = shape if name.endswith('_BL') else shape[:1]
    if array.shape != expected:
      lines.append(
        f'{name} has shape {array.shape}, expected {expected}, as '
        f'{standard} has {shape}'
      )
  if lines:
    raise ValueError('\n'.join(lines))


def select(
  arrays: Arrays,
  needs: Mapping[str, str],
  uses: Collection[str] = (),
  *,
  dtype: type[np.floating],
) -> dict[str, np.ndarray]:
  """The arrays that a computation reads, checked and in its types.

  Masks become bool, ids int32, real numbers `dtype`. Group and state ids are
  numbered anew, so that any integers will do. Off the loss mask ids are 0.

  Args:
    arrays: from `load`.
    needs: names that must be there, to who reads them; 'loss_mask_BL' is one.
    uses: names that are read where they are there.
    dtype: of the computation.

  Raises:
    ValueError: a line for each array that is missing, of another kind, or
      wrong on the loss mask.
  """
  missing = [
    f'lacks {name}, which {reader} reads'
    for name, reader in needs.items()
    if name not in arrays
  ]
  _raise_if(missing)
  chosen = {
    name: array
    for name, array in arrays.items()
    if name in needs or name in uses
  }
  _raise_if(
    f'{name} is {array.dtype}, expected {KINDS[name].words}'
    for name, array in chosen.items()
    if array.dtype.kind not in KINDS[name].codes
  )
  masks = [name for name in chosen if KINDS[name] is _MASK]
  _raise_if(
    where(f'{name}: neither 0 nor 1', wrong)
    for name in masks
    if (wrong := (chosen[name] != 0) & (chosen[name] != 1)).any()
  )
  mask_BL = chosen['loss_mask_BL'].astype(bool)
  found, problems = {}, []
  for name, array in chosen.items():
    if KINDS[name] is _MASK:
      found[name] = array.astype(bool)
    elif KINDS[name] is _REALS:
      with np.errstate(over='ignore'):  # it is told of, as inf
        found[name] = array.astype(dtype)
      problems += not_finite(name, found[name], mask_BL)
    elif name in _NUMBERED:
      problems += _outside(name, array, mask_BL)
      found[name] = np.where(mask_BL, array, 0).astype(np.int32)
    elif name == 'group_ids_B':
      found[name] = _renumbered(array)
    elif name == 'state_ids_BL':
      found[name] = np.where(mask_BL, _renumbered(array) + 1, 0)
    else:
      found[name] = array.astype(np.int32)
  _raise_if(problems)
  return found


def not_finite(name: str, x_BL: np.ndarray, mask_BL: np.ndarray) -> list[str]:
  """The line about numbers that are not finite on the mask, if there are."""
  wrong_BL = mask_BL & ~np.isfinite(x_BL)
  if not wrong_BL.any():
    return []
  return [where(f'{name}: not finite in {x_BL.dtype}', wrong_BL)]


def _outside(name, ids_BL, mask_BL):
  length = mask_BL.shape[1]
  wrong_BL = mask_BL & ((ids_BL < 1) | (ids_BL > length))
  if not wrong_BL.any():
    return []
  rule = f'{name}: must be in 1..{length} where loss_mask_BL is true'
  return [where(rule, wrong_BL)]


def where(problem: str, wrong: np.ndarray) -> str:
  """The line about slots that are wrong: how many, and the first."""
  first = [int(i) for i in np.argwhere(wrong)[0]]
  return f'{problem}; {int(wrong.sum())} slots, the first at {first}'


def _renumbered(ids: np.ndarray) -> np.ndarray:
  """int32 ids 0, 1, ... that are equal where the given ones are."""
  _, numbers = np.unique(ids, return_inverse=True)
  return numbers.reshape(ids.shape).astype(np.int32)


def _raise_if(problems) -> None:
  lines = list(problems)
  if lines:
    raise ValueError('\n'.join(lines))


def token_batch(arrays: Arrays) -> batch_lib.TokenBatch:
  """A batch of selected arrays.

  What nobody asked for is 0, or None where a batch may lack it. `values_BL`
  of the batch is `old_values_BL`.
  """
  mask_BL = arrays['loss_mask_BL']
  zeros_BL = np.zeros(mask_BL.shape, np.int32)
  fields = {
    'tokens_BL': zeros_BL,
    'lengths_B': np.zeros(len(mask_BL), np.int32),
    'group_ids_B': np.zeros(len(mask_BL), np.int32),
    'turn_ids_BL': zeros_BL,
    'sampler_logprobs_BL': None,
    'rewards_BL': None,
  }
  names = {'old_values_BL': 'values_BL'}
  outside = ('logprobs_BL', 'entropy_BL', 'values_BL')
  for name, array in arrays.items():
    if name not in outside:
      fields[names.get(name, name)] = array
  return batch_lib.TokenBatch(**fields)


def num_turns(arrays: Arrays) -> int:
  """The largest turn id, and 1 where there is none."""
  return int(arrays['turn_ids_BL'].max(initial=1))


def nonempty(arrays: Arrays) -> dict[str, np.ndarray]:
  """The arrays with a row and a token at least: one that counts nowhere."""
  return {
    name: np.pad(x, [(0, 0 if size else 1) for size in x.shape])
    for name, x in arrays.items()
  }


def save(path: str | pathlib.Path, arrays: Arrays) -> None:
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
