"""Makes pairs of trajectories from a file with a collected batch.

B trajectories, Q pairs, L tokens, M loss positions. An axis of length 2 holds
the preferred trajectory, then the dispreferred one.
"""

import hashlib
import pathlib
from typing import BinaryIO

import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax.rollout import batch_file
from stppo_jax.rollout import pack

# For each needed field of a `TokenBatch`: the words for its values in messages,
# and the letters of the numpy dtype kinds that the field may have.
_NEEDED = {
  'tokens_BL': ('integers', 'iu'),
  'loss_mask_BL': ('booleans, or 0 and 1', 'biu'),
  'rewards_BL': ('numbers', 'fiu'),
  'group_ids_B': ('integers', 'iu'),
}


def packed(
  tokens_Q2L: np.ndarray, loss_mask_Q2L: np.ndarray
) -> batch_lib.PairBatch:
  """Returns a batch of pairs, given their tokens and loss masks.

  Tokens after the last loss position of a row are set to 0.
  """
  length = loss_mask_Q2L.shape[2]
  positions_BM = pack.loss_positions(loss_mask_Q2L.reshape(-1, length))
  # The mask is true up to the last loss position of a row: later tokens do not
  # influence the loss.
  read_Q2L = np.flip(np.logical_or.accumulate(np.flip(loss_mask_Q2L, 2), 2), 2)
  return batch_lib.PairBatch(
    np.where(read_Q2L, tokens_Q2L, 0).astype(np.int32),
    loss_mask_Q2L,
    positions_BM.reshape(*loss_mask_Q2L.shape[:2], -1),
    read_Q2L.sum(axis=2, dtype=np.int32),
  )


def read(path: str | pathlib.Path) -> tuple[batch_lib.PairBatch, str]:
  """Returns the pairs in an npz file, and the SHA-256 of the file.

  The file must hold tokens_BL, loss_mask_BL, rewards_BL and group_ids_B, as in
  `TokenBatch`. The function `pairs` makes the pairs from these arrays.

  Raises:
    OSError: if there is no such file.
    ValueError: if the file is no npz file, lacks an array, has a wrong array,
      or has no pair; the message is one line.
  """
  path = pathlib.Path(path)
  with open(path, 'rb') as file:
    digest = hashlib.file_digest(file, 'sha256').hexdigest()
    file.seek(0)
    try:
      return pairs(**_arrays(file)), digest
    except ValueError as error:
      raise ValueError(f'{path}: {error}') from error


def pairs(
  tokens_BL: np.ndarray,
  loss_mask_BL: np.ndarray,
  rewards_BL: np.ndarray,
  group_ids_B: np.ndarray,
) -> batch_lib.PairBatch:
  """Returns the best and the worst trajectory of each group, by total reward.

  Of trajectories with equal totals, the first is taken. A group gives no pair
  if the totals of its rows are all equal, or if fewer than two of its rows have
  a loss position. (A row that ended in INFRA_ERROR has none.) Only rewards at
  loss positions count.

  Raises:
    ValueError: if shapes differ, a total is not finite, or there is no pair.
  """
  shape = tokens_BL.shape
  if len(shape) != 2:
    raise ValueError(f'tokens_BL has shape {shape}, expected [B, L]')
  for name, array, wanted in (
    ('loss_mask_BL', loss_mask_BL, shape),
    ('rewards_BL', rewards_BL, shape),
    ('group_ids_B', group_ids_B, shape[:1]),
  ):
    if array.shape != wanted:
      raise ValueError(f'{name} has shape {array.shape}, expected {wanted}')
  mask_BL = loss_mask_BL != 0
  totals_B = np.where(mask_BL, rewards_BL, 0.0).sum(axis=1, dtype=np.float64)
  if not np.isfinite(totals_B).all():
    row = int(np.flatnonzero(~np.isfinite(totals_B))[0])
    raise ValueError(
      f'rewards_BL: row {row} sums to {totals_B[row]}; must be finite'
    )
  chosen = []
  for group in np.unique(group_ids_B):
    rows = np.flatnonzero((group_ids_B == group) & mask_BL.any(axis=1))
    if len(rows):
      best = rows[totals_B[rows].argmax()]
      worst = rows[totals_B[rows].argmin()]
      if totals_B[best] > totals_B[worst]:
        chosen.append((best, worst))
  if not chosen:
    raise ValueError(
      'no pair: no group has two rows with different total rewards'
    )
  # The pairs are in the order of their groups; `minibatch` permutes them.
  rows_Q2 = np.array(chosen)
  return packed(tokens_BL[rows_Q2], mask_BL[rows_Q2])


def resized(pairs: batch_lib.PairBatch, *, bucket: int) -> batch_lib.PairBatch:
  """Returns the pairs, cut or padded to the shortest length that holds them.

  The length is a multiple of `bucket`.
  """
  size = -(-int(pairs.lengths_Q2.max()) // bucket) * bucket
  padding = ((0, 0), (0, 0), (0, max(size - pairs.tokens_Q2L.shape[2], 0)))
  return packed(
    np.pad(pairs.tokens_Q2L, padding)[:, :, :size],
    np.pad(pairs.loss_mask_Q2L, padding)[:, :, :size],
  )


def minibatch(
  pairs: batch_lib.PairBatch, number: int, *, size: int, seed: int
) -> batch_lib.PairBatch:
  """Returns the pairs of one update; every epoch permutes all pairs anew.

  The last minibatch of an epoch is filled up with pairs without tokens, which
  have no weight.

  Args:
    pairs: all pairs.
    number: the number of the update, from 0.
    size: the number of pairs of a minibatch.
    seed: the seed of the permutations.
  """
  # The permutation depends only on the seed and the epoch, so a resumed run
  # makes the same updates as a run that was never interrupted.
  count = len(pairs.tokens_Q2L)
  epoch, place = divmod(number, updates_per_epoch(count, size))
  order = np.random.default_rng((seed, epoch)).permutation(count)
  rows = order[place * size : (place + 1) * size]
  fill = lambda x: np.zeros((size - len(rows), *x.shape[1:]), x.dtype)
  chosen = lambda x: np.concatenate([x[rows], fill(x)])
  return batch_lib.PairBatch(
    chosen(pairs.tokens_Q2L),
    chosen(pairs.loss_mask_Q2L),
    chosen(pairs.loss_positions_Q2M),
    chosen(pairs.lengths_Q2),
  )


def updates_per_epoch(count: int, size: int) -> int:
  """Returns the number of minibatches of `size` that hold `count` pairs."""
  return -(-count // size)


def _arrays(file: BinaryIO) -> dict[str, np.ndarray]:
  """Returns the needed arrays of a file, after a check of their dtypes."""
  arrays = batch_file.read(file, _NEEDED)
  missing = [name for name in _NEEDED if name not in arrays]
  if missing:
    raise ValueError(f'lacks {", ".join(missing)}')
  for name, array in arrays.items():
    words, kinds = _NEEDED[name]
    if array.dtype.kind not in kinds:
      raise ValueError(f'{name} is {array.dtype}, expected {words}')
  return arrays
