"""Decides, on the host, which sequences share a row of the forward pass.

s shards of a minibatch, one for each device along the mesh axes that divide
rows; m sequences of a shard; n microbatches; b slots for the sequences of a
shard in a microbatch. A row has `row_length` tokens.

The sequences are dealt to the shards in rounds, longest first. In each round
every shard gets one sequence: the shard with the fewest tokens so far gets the
longest sequence of the round. So all shards have equally many sequences and
nearly equally many tokens. Each shard then puts its sequences into rows, first
fit by decreasing length. The array sizes are the sizes that the fullest shard
needs, rounded up so that few different sizes occur: each combination of sizes
is another program to compile. All hosts know all lengths, so all hosts compute
the same packing.
"""

from typing import NamedTuple

import jax
import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax.parallel import activations

# `plan` rounds the number of loss positions of a row up to a multiple of
# max(half of the row's tokens, 256), and at most to the number of the row's
# tokens. Smaller steps would need more compiled programs and save too little.
_LOSS_SHARES, _FEW_LOSSES = 2, 256


class Sizes(NamedTuple):
  """The limits within which `plan` packs sequences into rows.

  Attributes:
    num_shards: the number of shards, s.
    row_length: the number of tokens of a row, at least as many as the longest
      sequence has.
    max_rows: the largest number of rows of a shard in a microbatch; 0 means no
      limit.
    num_workers: the number of workers that share the microbatches. If there are
      at least num_workers microbatches, their number is a multiple of
      num_workers, so that each worker gets equally many.
  """

  num_shards: int
  row_length: int
  max_rows: int
  num_workers: int


def sizes(
  mesh: jax.sharding.Mesh,
  *,
  row_length: int,
  microbatch: int,
  num_workers: int = 1,
) -> Sizes:
  """Returns the sizes of packed rows on a mesh.

  Args:
    mesh: the mesh of training.
    row_length: see `Sizes`.
    microbatch: the number of rows of a forward pass, over all shards; 0 means
      that a minibatch is one microbatch.
    num_workers: see `Sizes`.
  """
  num_shards = activations.extent(mesh, activations.ROWS)
  return Sizes(num_shards, row_length, microbatch // num_shards, num_workers)


class Packed(NamedTuple):
  """The sequences of a minibatch in the order of the shards, and their rows.

  Attributes:
    rows: int32, the indices of the sequences in the batch, shard by shard.
    packing: where these sequences stand in packed rows.
  """

  rows: np.ndarray
  packing: batch_lib.Packing


def for_annotate(sizes: Sizes, minibatch_size: int) -> Sizes:
  """Returns the sizes of packed rows in programs without a backward pass.

  Args:
    sizes: the sizes of packed rows in updates.
    minibatch_size: the number of trajectories of an update.
  """
  if sizes.num_workers > 1:
    # In an update each core computes a microbatch of its own. Without a
    # backward pass all cores compute one microbatch together, which may have
    # four times as many rows as the microbatches of all cores in an update.
    # With such large microbatches, few different numbers of microbatches occur,
    # and so few programs are compiled.
    rows = 4 * sizes.max_rows * sizes.num_workers
    return sizes._replace(max_rows=rows, num_workers=1)
  # The rows of a whole collected batch, which may consist of many minibatches,
  # would be too many for one forward pass. If updates have no limit, the limit
  # is the number of rows of a minibatch.
  rows = minibatch_size // sizes.num_shards
  return sizes._replace(max_rows=sizes.max_rows or rows)


def plan(
  rows: np.ndarray,
  lengths_B: np.ndarray,
  losses_B: np.ndarray,
  sizes: Sizes,
) -> Packed:
  """Returns the packing of some sequences of a batch.

  Args:
    rows: the indices of the sequences in the batch; s divides their number.
    lengths_B: the number of tokens of each sequence of the batch.
    losses_B: the number of loss positions of each sequence of the batch.
    sizes: see `Sizes`.
  """
  rows = np.asarray(rows, np.int32)
  lengths, losses = np.asarray(lengths_B)[rows], np.asarray(losses_B)[rows]
  members_sm = _deal(lengths, sizes.num_shards)
  # From here on a sequence is known by its index in its shard. A device looks
  # the sequence up in its own shard of the batch, so no data is sent.
  shards = [_first_fit(lengths[m], sizes.row_length) for m in members_sm]
  most = max(len(shard) for shard in shards)
  max_rows = sizes.max_rows or most
  # n is rounded up, so a microbatch may have no sequence. n is at most the
  # number of microbatches that one sequence per row would need.
  n = min(rounded(-(-most // max_rows)), -(-members_sm.shape[1] // max_rows))
  # All cores get equally many microbatches. If one core had one more, all other
  # cores would wait for it.
  workers = min(n, sizes.num_workers)
  n = -(-n // workers) * workers
  # If n was rounded up, a microbatch may need fewer rows than max_rows.
  num_rows = rounded(-(-most // n), steps=4)
  if sizes.max_rows:
    num_rows = min(num_rows, sizes.max_rows)
  parts = list(zip(*(_shares(shard, n) for shard in shards)))
  most_sequences = max(sum(map(len, part)) for x in parts for part in x)
  b = max(8, rounded(most_sequences, steps=1))
  # An unused slot keeps an index and a start that are too large. For this slot
  # `minibatches` reads zeros, and `forward` writes no token into a row.
  empty = sizes.row_length * num_rows
  places_nsb = np.full((n, len(shards), b), len(members_sm[0]), np.int32)
  starts_nsb = np.full((n, len(shards), b), empty, np.int32)
  num_losses = 1
  for i, part in enumerate(parts):
    for shard, shard_rows in enumerate(part):
      own = lengths[members_sm[shard]], losses[members_sm[shard]]
      places = np.concatenate([[], *shard_rows]).astype(np.int32)
      # Sequences are placed row by row, because `forward` needs increasing
      # starts.
      starts = [
        number * sizes.row_length + np.cumsum(own[0][row]) - own[0][row]
        for number, row in enumerate(shard_rows)
      ]
      places_nsb[i, shard, : len(places)] = places
      starts_nsb[i, shard, : len(places)] = np.concatenate([[], *starts])
      sums = [int(own[1][row].sum()) for row in shard_rows]
      num_losses = max(num_losses, *sums, 1)
  # The head computes logits at `num_losses` positions of every row. For long
  # rows `num_losses` is either half of a row's tokens or all of them, because
  # each value of `num_losses` needs a program of its own.
  share = max(-(-sizes.row_length // _LOSS_SHARES), _FEW_LOSSES)
  packing = batch_lib.Packing(
    places_nsb,
    starts_nsb,
    num_rows=num_rows,
    row_length=sizes.row_length,
    num_losses=min(-(-num_losses // share) * share, sizes.row_length),
  )
  return Packed(rows[members_sm.reshape(-1)], packing)


def rounded(count: int, *, steps: int = 8) -> int:
  """Rounds a number up, so that few different numbers occur.

  The results above one power of two, up to and including the next power of
  two, are at most `steps` different numbers. `steps` is a power of two.
  """
  unit = max(1, (1 << max(count, 1).bit_length() - 1) // steps)
  return -(-count // unit) * unit


def _deal(lengths: np.ndarray, num_shards: int) -> np.ndarray:
  """Returns the indices of each shard's sequences, longest first, [s, m]."""
  # Both sorts are stable, because all hosts must break ties alike.
  order = np.argsort(-lengths, kind='stable').reshape(-1, num_shards)
  members_ms = np.empty_like(order)
  loads_s = np.zeros(num_shards, np.int64)
  for place, group in enumerate(order):
    emptiest = np.argsort(loads_s, kind='stable')
    members_ms[place, emptiest] = group
    loads_s[emptiest] += lengths[group]
  return members_ms.T


def _shares(rows: list[list[int]], n: int) -> list[list[list[int]]]:
  """Returns the rows of each of n microbatches.

  The microbatches have about equally many sequences. For this, rows with many
  short sequences are put together with rows with few long sequences.
  """
  # The rows are sorted by their number of sequences and dealt in rounds, one
  # row for each microbatch. Every second round is dealt in the reverse order.
  # So the microbatch that gets the row with the most sequences of one round
  # gets the row with the fewest sequences of the next round.
  rows = sorted(rows, key=len, reverse=True)
  rounds = [rows[k : k + n] for k in range(0, len(rows), n)]
  for late in rounds[1::2]:
    late.extend([[]] * (n - len(late)))  # the last round may lack rows
    late.reverse()
  return [[r[i] for r in rounds if i < len(r)] for i in range(n)]


def _first_fit(lengths: np.ndarray, row_length: int) -> list[list[int]]:
  """Puts sequences into rows; returns the sequences' indices in each row.

  Args:
    lengths: the number of tokens of each sequence, the longest first.
    row_length: the number of tokens of a row.
  """
  # `free` has the number of free tokens of each row. The entries for rows that
  # do not exist yet are 0.
  rows, free = [], np.zeros(len(lengths), np.int64)
  for place, length in enumerate(lengths):
    fits = np.flatnonzero(free[: len(rows)] >= length)
    if not len(fits):
      free[len(rows)] = row_length
      fits = [len(rows)]
      rows.append([])
    rows[fits[0]].append(place)
    free[fits[0]] -= length
  return rows
