"""Frozen rollouts: the arrays of one collection, and what they must be.

B trajectories, L tokens. The arrays of a file (see `batch_file`) have the
names, axes and meanings of `batch.TokenBatch`, but for these three of the
policy and the value model after some updates, and the fourth, which a
`TokenBatch` calls values_BL:

  logprobs_BL    log pi_theta
  entropy_BL     of pi_theta at each token, nats
  values_BL      V of the updated value model
  old_values_BL  V before the first update

and one number:

  kl_coefficient  of the KL penalty in force when it was collected

Such a file need not be ours: any origin will do, with the arrays a command
reads and no others. What stands off the loss mask has no meaning and may be
anything. Arrays of other names are passed over.
"""

from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
import typing

import numpy as np

from stppo_jax import batch as batch_lib

Arrays = Mapping[str, np.ndarray]


class NotFinite(ValueError):
  """What was computed of finite numbers is too large for the precision."""


class ArrayKind(typing.NamedTuple):
  """What an array may hold.

  Attributes:
    words: for a person.
    codes: numpy's kinds of such a dtype.
  """

  words: str
  codes: str


_IDS = ArrayKind('integers', 'iu')
_MASK = ArrayKind('booleans, or 0 and 1', 'biu')
_REALS = ArrayKind('real numbers', 'fiu')

# The name says the axes; without an ending it is one number.
ARRAY_KINDS: Mapping[str, ArrayKind] = {
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
  'kl_coefficient': _REALS,
}
# Numbered through the row from 1, so that no id is above L.
_NUMBERED = ('turn_ids_BL', 'sentence_ids_BL')
# Of the models after the updates, or about the collection: in no `TokenBatch`.
_OUTSIDE = ('logprobs_BL', 'entropy_BL', 'values_BL', 'kl_coefficient')


def select(
  arrays: Arrays, needs: Mapping[str, str], *, dtype: type[np.floating]
) -> dict[str, np.ndarray]:
  """The arrays that a computation reads, checked and in its types.

  Masks become bool, ids int32, real numbers `dtype`. Group and state ids are
  numbered anew, so that any integers will do. Off the loss mask ids are 0.

  Args:
    arrays: from `batch_file.load`.
    needs: names that must be there, to who reads them; 'loss_mask_BL' is one.
    dtype: of the computation.

  Raises:
    ValueError: a line for each array that is missing, of another shape or
      kind, or wrong on the loss mask. Arrays of other names may be anything.
  """
  missing = [
    f'lacks {name}, which {reader} reads'
    for name, reader in needs.items()
    if name not in arrays
  ]
  _raise_if(missing)
  chosen = {name: x for name, x in arrays.items() if name in needs}
  _raise_if(_misshapen(chosen))
  _raise_if(
    f'{name} is {array.dtype}, expected {ARRAY_KINDS[name].words}'
    for name, array in chosen.items()
    if array.dtype.kind not in ARRAY_KINDS[name].codes
  )
  masks = [name for name in chosen if ARRAY_KINDS[name] is _MASK]
  _raise_if(
    locate(f'{name}: neither 0 nor 1', wrong)
    for name in masks
    if (wrong := (chosen[name] != 0) & (chosen[name] != 1)).any()
  )
  mask_BL = chosen['loss_mask_BL'].astype(bool)
  found, problems = {}, []
  for name, array in chosen.items():
    if ARRAY_KINDS[name] is _MASK:
      found[name] = array.astype(bool)
    elif ARRAY_KINDS[name] is _REALS:
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


def select_optional(
  arrays: Arrays, uses: Collection[str], *, dtype: type[np.floating]
) -> tuple[dict[str, np.ndarray], list[str]]:
  """Those of some arrays that can be read, and why the others cannot.

  Args:
    arrays: from `batch_file.load`, with a sound loss_mask_BL.
    uses: names of arrays that nobody needs; they may be missing.
    dtype: of the computation.

  Returns:
    The arrays as `select` gives them, and a line for each that it refuses.
  """
  found, lines = {}, []
  for name in (name for name in uses if name in arrays):
    needs = dict.fromkeys(('loss_mask_BL', name), 'it')
    try:
      found[name] = select(arrays, needs, dtype=dtype)[name]
    except ValueError as error:
      lines += str(error).splitlines()
  return found, lines


def _misshapen(arrays: Arrays) -> Iterator[str]:
  """A line for each array that does not fit to loss_mask_BL."""
  shape = arrays['loss_mask_BL'].shape
  if len(shape) != 2:
    yield f'loss_mask_BL has shape {shape}, expected [B, L]'
    return
  for name, array in arrays.items():
    expected = shape[: _num_axes(name)]
    if array.shape != expected:
      yield (
        f'{name} has shape {array.shape}, expected {expected}, as '
        f'loss_mask_BL has {shape}'
      )


def _num_axes(name: str) -> int:
  axes = name.rpartition('_')[2]
  return len(axes) if axes in ('B', 'BL') else 0


def not_finite(name: str, x_BL: np.ndarray, mask_BL: np.ndarray) -> list[str]:
  """The line about numbers that are not finite on the mask, if there are."""
  if not x_BL.ndim:  # one number, which speaks for the whole batch
    fine = np.isfinite(x_BL)
    return [] if fine else [f'{name}: not finite in {x_BL.dtype}']
  wrong_BL = mask_BL & ~np.isfinite(x_BL)
  if not wrong_BL.any():
    return []
  return [locate(f'{name}: not finite in {x_BL.dtype}', wrong_BL)]


def _outside(name, ids_BL, mask_BL):
  length = mask_BL.shape[1]
  wrong_BL = mask_BL & ((ids_BL < 1) | (ids_BL > length))
  if not wrong_BL.any():
    return []
  rule = f'{name}: must be in 1..{length} where loss_mask_BL is true'
  return [locate(rule, wrong_BL)]


def locate(problem: str, wrong: np.ndarray) -> str:
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
  for name, array in arrays.items():
    if name not in _OUTSIDE:
      fields[names.get(name, name)] = array
  return batch_lib.TokenBatch(**fields)


def num_turns(arrays: Arrays) -> int:
  """The largest turn id, and 1 where there is none."""
  return int(arrays['turn_ids_BL'].max(initial=1))


def pad_empty(arrays: Arrays) -> dict[str, np.ndarray]:
  """The arrays with a row and a token at least: one that counts nowhere."""
  return {
    name: np.pad(x, [(0, 0 if size else 1) for size in x.shape])
    if x.ndim
    else x
    for name, x in arrays.items()
  }


def unpad(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """Without the row and the token that `nonempty` may have added."""
  return x[: shape[0], : shape[1]] if x.ndim == 2 else x


def check_finite(arrays: Arrays) -> None:
  """Looks at what was computed of finite numbers.

  Raises:
    NotFinite: names what is not.
  """
  names = [name for name, x in arrays.items() if not np.isfinite(x).all()]
  if names:
    dtype = arrays[names[0]].dtype
    raise NotFinite(
      f'{", ".join(names)}: not finite in {dtype}, for too large numbers'
    )
