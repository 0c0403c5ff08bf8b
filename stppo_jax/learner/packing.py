"""Decides, on the host, which sequences share a row of the forward pass.

s shards of a minibatch, one for each device along the axes of rows; n
microbatches; r rows of a microbatch in a shard, and b the most sequences that r
rows hold. A row has `row_length` tokens.

The sequences are dealt to the shards by length, longest first, each to the
shard with the fewest tokens so far: all shards get equally many sequences, and
nearly equally many tokens. Each shard then puts its sequences into rows, first
fit by decreasing length. The sizes are those of the fullest shard, rounded up,
because each combination is another program to compile. All of it follows from
lengths that every host knows, so the hosts agree.
"""

from typing import NamedTuple

import jax
import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax.parallel import activations

# The number of loss positions of a row is a multiple of half of its tokens, and
# of at least 256: a finer choice is not worth further programs.
_LOSS_SHARES, _FEW_LOSSES = 2, 256


class Sizes(NamedTuple):
  """The numbers that decide the shape of packed rows, beside the sequences.

  Attributes:
    num_shards: s.
    row_length: tokens of a row, at least those of the longest sequence.
    max_rows: the most rows that a shard computes at once; 0: all.
    num_workers: if there are at least so many microbatches, their number is a
      multiple of it.
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
  """Returns the sizes of rows on a mesh.

  Args:
    mesh: the mesh of training.
    row_length: see `Sizes`.
    microbatch: rows of a forward pass, which the shards divide; 0: all.
    num_workers: see `Sizes`.
  """
  num_shards = activations.extent(mesh, activations.ROWS)
  return Sizes(num_shards, row_length, microbatch // num_shards, num_workers)


class Packed(NamedTuple):
  """The sequences of a minibatch in the order of the shards, and their rows.

  Attributes:
    rows: int32, numbers of sequences: those of the first shard, and so on.
    packing: where they are in packed rows.
  """

  rows: np.ndarray
  packing: batch_lib.Packing


def for_annotate(sizes: Sizes, minibatch_size: int) -> Sizes:
  """Returns the sizes of packed rows where nothing is differentiated.

  Args:
    sizes: the sizes of packed rows in updates.
    minibatch_size: the trajectories of an update.
  """
  if sizes.num_workers > 1:
    # All cores share this program, so it takes the rows of all of them, and
    # four times as many: the numbers of microbatches then stay few, and so do
    # the programs.
    rows = 4 * sizes.max_rows * sizes.num_workers
    return sizes._replace(max_rows=rows, num_workers=1)
  # A collected batch may have many minibatches, and so too many rows for one
  # forward pass.
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
    rows: the numbers of the sequences; s divides how many there are.
    lengths_B: the number of tokens of each sequence of the batch.
    losses_B: the number of loss positions of each sequence.
    sizes: see `Sizes`.
  """
  rows = np.asarray(rows, np.int32)
  lengths, losses = np.asarray(lengths_B)[rows], np.asarray(losses_B)[rows]
  members_sm = _deal(lengths, sizes.num_shards)
  # From here on a sequence is known by its place among those of its shard: the
  # devices look it up in their own part of the batch, and nothing is sent.
  shards = [_first_fit(lengths[m], sizes.row_length) for m in members_sm]
  most = max(len(shard) for shard in shards)
  max_rows = sizes.max_rows or most
  # Rounding up may leave a microbatch without a sequence. But there are never
  # more microbatches than if each sequence had a row of its own.
  n = min(rounded(-(-most // max_rows)), -(-members_sm.shape[1] // max_rows))
  # Each core gets as many microbatches as any other: with one microbatch more,
  # one core would compute it while all others wait.
  workers = min(n, sizes.num_workers)
  n = -(-n // workers) * workers
  # With more microbatches each has fewer rows, and the rest would be padding.
  num_rows = rounded(-(-most // n), steps=4)
  if sizes.max_rows:
    num_rows = min(num_rows, sizes.max_rows)
  parts = list(zip(*(_shares(shard, n) for shard in shards)))
  most_sequences = max(sum(map(len, part)) for x in parts for part in x)
  b = max(8, rounded(most_sequences, steps=1))
  # Places that no sequence takes keep a number and a start that are too large:
  # `minibatches` reads zeros there, and `forward` puts nothing into a row.
  empty = sizes.row_length * num_rows
  places_nsb = np.full((n, len(shards), b), len(members_sm[0]), np.int32)
  starts_nsb = np.full((n, len(shards), b), empty, np.int32)
  num_losses = 1
  for i, part in enumerate(parts):
    for shard, shard_rows in enumerate(part):
      own = lengths[members_sm[shard]], losses[members_sm[shard]]
      places = np.concatenate([[], *shard_rows]).astype(np.int32)
      # Sequences are placed row by row, so that their starts increase, as
      # `forward` needs it.
      starts = [
        number * sizes.row_length + np.cumsum(own[0][row]) - own[0][row]
        for number, row in enumerate(shard_rows)
      ]
      places_nsb[i, shard, : len(places)] = places
      starts_nsb[i, shard, : len(places)] = np.concatenate([[], *starts])
      sums = [int(own[1][row].sum()) for row in shard_rows]
      num_losses = max(num_losses, *sums, 1)
  # The head computes logits at so many positions of every row. Only half a row
  # and a whole row are possible, because each number is a program of its own.
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
  """Returns a number rounded up, so that few different numbers are left.

  Between a power of two and the next one, `steps` numbers are left.
  """
  unit = max(1, (1 << max(count, 1).bit_length() - 1) // steps)
  return -(-count // unit) * unit


def _deal(lengths: np.ndarray, num_shards: int) -> np.ndarray:
  """Returns int [s, m], the members of each shard, the longest first."""
  # Stable sorts, here and below: all hosts must break ties alike.
  order = np.argsort(-lengths, kind='stable').reshape(-1, num_shards)
  members_ms = np.empty_like(order)
  loads_s = np.zeros(num_shards, np.int64)
  for place, group in enumerate(order):
    emptiest = np.argsort(loads_s, kind='stable')
    members_ms[place, emptiest] = group
    loads_s[emptiest] += lengths[group]
  return members_ms.T


def _shares(rows: list[list[int]], n: int) -> list[list[list[int]]]:
  """Returns the rows of each microbatch, with about equally many sequences.

  So a row with many short sequences joins rows with few long ones.
  """
  # Dealt like cards, back and forth: every second round is reversed, so that
  # the fullest row of a round meets the emptiest of the next.
  rows = sorted(rows, key=len, reverse=True)
  rounds = [rows[k : k + n] for k in range(0, len(rows), n)]
  for late in rounds[1::2]:
    late.extend([[]] * (n - len(late)))  # the last round may be short
    late.reverse()
  return [[r[i] for r in rounds if i < len(r)] for i in range(n)]


def _first_fit(lengths: np.ndarray, row_length: int) -> list[list[int]]:
  """Returns the places of the sequences in each row.

  Args:
    lengths: tokens of sequences, the longest first.
    row_length: tokens of a row.
  """
  # A row that is not opened yet has no free token.
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
