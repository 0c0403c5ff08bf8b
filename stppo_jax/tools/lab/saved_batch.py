"""Reads saved batches, and checks the values in their arrays.

B trajectories, L tokens. The arrays of a file have the names, axes and meanings
of the fields of `batch.TokenBatch`, except for these arrays:

  logprobs_BL     log pi_theta, where pi_theta is the policy after some updates
  entropy_BL      entropy of pi_theta at each token, nats
  values_BL       V after the updates
  old_values_BL   V before the first update (`values_BL` of a `TokenBatch`)
  kl_coefficient  a number: the KL penalty's coefficient at the collection
  oracle_*_BL     sampled values, see `continuations.as_arrays`

Any program may write such a file. For a command, the file needs only the arrays
that the command reads. Array elements off the loss mask have no meaning and may
be anything, but some estimators read values of observation tokens. Arrays with
other names are ignored.
"""

from collections.abc import Iterable, Iterator, Mapping
import pathlib
from typing import Any, NamedTuple

import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax.rollout import batch_file

Arrays = Mapping[str, np.ndarray]


class NotFinite(ValueError):
  """The error of a result that is too large for the precision."""


class Result(NamedTuple):
  """The metrics and arrays that a command computes on a saved batch.

  Attributes:
    metrics: the metrics by name.
    arrays: the arrays by name.
  """

  metrics: dict[str, float]
  arrays: dict[str, np.ndarray]


class ArrayKind(NamedTuple):
  """A rule for the elements of an array.

  Attributes:
    description: the allowed elements, for error messages.
    dtype_kinds: the allowed values of numpy's `dtype.kind`.
  """

  description: str
  dtype_kinds: str


_IDS = ArrayKind('integers', 'iu')
_MASK = ArrayKind('booleans, or 0 and 1', 'biu')
_REALS = ArrayKind('real numbers', 'fiu')

# The arrays that a file may have. The suffix of a name gives the axes, and an
# array without a suffix is a single number.
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
  'oracle_values_BL': _REALS,
  'oracle_variances_BL': _REALS,
  'oracle_counts_BL': _IDS,
  'kl_coefficient': _REALS,
}
# Rounding to bfloat16 can raise a log-probability this much above 0.
_ROUNDING = 1e-3
# The arrays of ids that count from 1 within a row, so that no id exceeds L.
_IDS_FROM_1 = ('turn_ids_BL', 'sentence_ids_BL')
# The arrays that have no field in a `TokenBatch`.
_NOT_IN_TOKEN_BATCH = (
  'logprobs_BL',
  'entropy_BL',
  'values_BL',
  'kl_coefficient',
  'oracle_values_BL',
  'oracle_variances_BL',
  'oracle_counts_BL',
)


def load(path: str | pathlib.Path) -> dict[str, np.ndarray]:
  """Returns the arrays that a file has under the names of `ARRAY_KINDS`.

  If the file has `values_BL` but no `old_values_BL`, the result has `values_BL`
  under both names.

  Raises:
    OSError: there is no such file.
    ValueError: the file is not an npz file, has none of these arrays, or has a
      loss mask that is false everywhere.
  """
  with open(path, 'rb') as file:
    arrays = batch_file.read(file, ARRAY_KINDS)
  if not arrays:
    names = ', '.join(ARRAY_KINDS)
    raise ValueError(f'has no array of these names: {names}')
  # If the mask is false everywhere, all losses and gradients are 0, which would
  # look like a result.
  mask_BL = arrays.get('loss_mask_BL')
  if mask_BL is not None and mask_BL.size and not np.count_nonzero(mask_BL):
    raise ValueError('loss_mask_BL: 0 everywhere, so there is nothing to learn')
  # All commands read `old_values_BL`. A file of another program may have the
  # shorter name.
  if 'values_BL' in arrays:
    arrays.setdefault('old_values_BL', arrays['values_BL'])
  return arrays


def load_advantages(
  path: str | pathlib.Path,
  loss_mask_BL: np.ndarray,
  *,
  dtype: type[np.floating],
) -> np.ndarray:
  """Returns advantages_BL of a file that `lab advantages` may have written.

  Args:
    path: the path of the file.
    loss_mask_BL: the loss mask of the saved batch to which the advantages
      belong.
    dtype: the dtype of the computation.

  Raises:
    OSError: there is no such file.
    ValueError: the file has no advantages, or the advantages have another shape
      than the loss mask or are not finite on the loss mask.
  """
  arrays = {**load(path), 'loss_mask_BL': loss_mask_BL}
  readers = {
    name: 'every algorithm' for name in ('loss_mask_BL', 'advantages_BL')
  }
  return select(arrays, readers, dtype=dtype)['advantages_BL']


def select(
  arrays: Arrays, readers: Mapping[str, str], *, dtype: type[np.floating]
) -> dict[str, np.ndarray]:
  """Returns the arrays that a computation reads, checked and converted.

  Masks are converted to bool, ids to int32, and real numbers to `dtype`. Group
  and state ids are renumbered, so a file may use any integers as these ids.
  Turn, sentence and state ids off the loss mask become 0.

  Args:
    arrays: the arrays of a batch file, see `load`.
    readers: maps the name of each required array to the name of the array's
      reader, such as an algorithm, for error messages. One of these arrays is
      'loss_mask_BL'.
    dtype: the dtype of the computation.

  Raises:
    ValueError: a required array is missing, has the wrong shape or kind, or has
      wrong values on the loss mask. The message has a line for each array.
  """
  _raise_if(
    f'lacks {name}, which {reader} reads'
    for name, reader in readers.items()
    if name not in arrays
  )
  # Each check relies on earlier checks: for example, an array of a wrong shape
  # cannot be compared with the mask. So each check raises its errors before the
  # next check begins.
  chosen = {name: x for name, x in arrays.items() if name in readers}
  _raise_if(_shape_errors(chosen))
  _raise_if(
    f'{name} is {array.dtype}, expected {ARRAY_KINDS[name].description}'
    for name, array in chosen.items()
    if array.dtype.kind not in ARRAY_KINDS[name].dtype_kinds
  )
  masks = [name for name in chosen if ARRAY_KINDS[name] is _MASK]
  _raise_if(
    locate(f'{name}: neither 0 nor 1', wrong)
    for name in masks
    if (wrong := (chosen[name] != 0) & (chosen[name] != 1)).any()
  )
  mask_BL = chosen['loss_mask_BL'].astype(bool)
  converted, problems = {}, []
  for name, array in chosen.items():
    if ARRAY_KINDS[name] is _MASK:
      converted[name] = array.astype(bool)
    elif ARRAY_KINDS[name] is _REALS:
      with np.errstate(over='ignore'):  # an overflow is reported below
        converted[name] = array.astype(dtype)
      problems += not_finite(name, converted[name], mask_BL)
      if name.endswith('logprobs_BL'):
        # Values from 0 to _ROUNDING are allowed. `not_finite` has reported inf.
        x_BL = converted[name]
        above = mask_BL & (x_BL > _ROUNDING) & np.isfinite(x_BL)
        problems += [locate(f'{name}: above 0', above)] if above.any() else []
    elif name in _IDS_FROM_1:
      problems += _out_of_range(name, array, mask_BL)
      # Tokens off the mask may have any ids in a file. These ids become 0, so
      # the tokens are in no segment, and no large id overflows int32.
      converted[name] = np.where(mask_BL, array, 0).astype(np.int32)
    elif name == 'group_ids_B':
      converted[name] = _renumbered(array)
    # An id of 0 is for tokens off the mask, so the ids of states begin at 1.
    elif name == 'state_ids_BL':
      converted[name] = np.where(mask_BL, _renumbered(array) + 1, 0)
    else:
      converted[name] = array.astype(np.int32)
  _raise_if(problems)
  return converted


def select_optional(
  arrays: Arrays, names: Iterable[str], *, dtype: type[np.floating]
) -> tuple[dict[str, np.ndarray], list[str]]:
  """Returns the valid optional arrays, and lines about the invalid arrays.

  Args:
    arrays: the arrays of a batch file, see `load`, with a valid loss_mask_BL.
    names: the names of the arrays, which may be missing.
    dtype: the dtype of the computation.

  Returns:
    The valid arrays as `select` converts them, and lines about invalid arrays.
  """
  valid, problems = {}, []
  for name in (name for name in names if name in arrays):
    readers = dict.fromkeys(('loss_mask_BL', name), 'the command')
    try:
      valid[name] = select(arrays, readers, dtype=dtype)[name]
    except ValueError as error:
      problems += str(error).splitlines()
  return valid, problems


def _shape_errors(arrays: Arrays) -> Iterator[str]:
  """Yields a line for each array whose shape does not fit loss_mask_BL."""
  shape = arrays['loss_mask_BL'].shape
  if len(shape) != 2 or 0 in shape:
    yield f'loss_mask_BL has shape {shape}, expected [B, L], each 1 or more'
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
  """Returns [a line] if elements on the mask are not finite; otherwise [].

  Args:
    name: the name of the array.
    x_BL: the array, or a single number. For a number, the mask is not used.
    mask_BL: true where elements must be finite.
  """
  problem = f'{name}: not finite in {x_BL.dtype}'
  if not x_BL.ndim:
    return [] if np.isfinite(x_BL) else [problem]
  wrong_BL = mask_BL & ~np.isfinite(x_BL)
  return [locate(problem, wrong_BL)] if wrong_BL.any() else []


def _out_of_range(
  name: str, ids_BL: np.ndarray, mask_BL: np.ndarray
) -> list[str]:
  """Returns [a line] if ids on the mask are not in 1..L; otherwise []."""
  length = mask_BL.shape[1]
  wrong_BL = mask_BL & ((ids_BL < 1) | (ids_BL > length))
  if not wrong_BL.any():
    return []
  rule = f'{name}: must be in 1..{length} where loss_mask_BL is true'
  return [locate(rule, wrong_BL)]


def locate(problem: str, wrong: np.ndarray) -> str:
  """Returns `problem` with the number and the first index of wrong elements."""
  first = [int(i) for i in np.argwhere(wrong)[0]]
  return f'{problem}; {int(wrong.sum())} entries, the first at {first}'


def _renumbered(ids: np.ndarray) -> np.ndarray:
  """Returns ids renumbered as 0, 1, ... in int32; equal ids stay equal."""
  _, numbers = np.unique(ids, return_inverse=True)
  return numbers.reshape(ids.shape).astype(np.int32)


def _raise_if(problems: Iterable[str]) -> None:
  lines = list(problems)
  if lines:
    raise ValueError('\n'.join(lines))


def token_batch(arrays: Arrays) -> batch_lib.TokenBatch:
  """Returns a `TokenBatch` with the given arrays, which `select` has returned.

  A field without an array is None. But if the tokens, the lengths, the group
  ids or the turn ids have no array, they are 0. The field `values_BL` of the
  batch is the array `old_values_BL`.
  """
  mask_BL = arrays['loss_mask_BL']
  zeros_BL = np.zeros(mask_BL.shape, np.int32)
  fields: dict[str, Any] = {
    'tokens_BL': zeros_BL,
    'lengths_B': np.zeros(len(mask_BL), np.int32),
    'group_ids_B': np.zeros(len(mask_BL), np.int32),
    'turn_ids_BL': zeros_BL,
    'sampler_logprobs_BL': None,
    'rewards_BL': None,
  }
  field_names = {'old_values_BL': 'values_BL'}
  for name, array in arrays.items():
    if name not in _NOT_IN_TOKEN_BATCH:
      fields[field_names.get(name, name)] = array
  return batch_lib.TokenBatch(**fields)


def num_turns(arrays: Arrays) -> int:
  """Returns the largest turn id, at least 1."""
  return int(arrays['turn_ids_BL'].max(initial=1))


def check_finite(arrays: Arrays) -> None:
  """Checks that results which were computed from finite numbers are finite.

  Raises:
    NotFinite: a result is not finite; the message names all such results.
  """
  names = [name for name, x in arrays.items() if not np.isfinite(x).all()]
  if names:
    dtype = arrays[names[0]].dtype
    raise NotFinite(
      f'{", ".join(names)}: not finite in {dtype}, the numbers are too large'
    )
