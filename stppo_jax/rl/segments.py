"""Sums x over the segments of a row, and spreads values of segments to tokens.

B trajectories, L tokens, T segments of a row. `ids_BL` has the segment of each
token, 1..T, and 0 for tokens in no segment. The levels token, turn, sentence
and sequence differ in these ids only.

Three implementations give the same numbers. `choose` picks one by the number
of segments and the platform:

  segment_sum: a scatter-add, vmapped over rows, the fastest on CPU. (A mesh
    would all-reduce one flat table of B * T segments in full.) Each row has
    several tables, which successive tokens use in turn and which are added up
    at the end. With one table, successive tokens would mostly add to the
    same slot, and each addition would wait for the previous one. Shorter sums
    also round less.
  unrolled: one masked reduction per segment, unrolled over the static T. It has
    no scatter, neither in the value nor in the gradient, so it is deterministic
    and fast on GPU and TPU.
  broadcast: the same masks from one comparison [B, T, L], which an
    accelerator's compiler fuses into the reduction. It has no scatter either.
    It serves levels with too many segments to unroll, such as sentences.

An id above T is an error of the caller. Its token belongs to no segment.
"""

import functools
import typing

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.rl import masking

Array = jax.Array

MAX_UNROLLED = 32
_NUM_TABLES = 8  # tables per row in segment_sum; more are not faster


class Segments(typing.NamedTuple):
  """Segment ids [B, L] and the static number of segments."""

  ids_BL: Array
  num: int


LEVELS = ('token', 'turn', 'sentence', 'sequence')


def level_segments(
  level: str, batch: batch_lib.TokenBatch, *, num_turns: int
) -> Segments:
  """Returns the segments of a level.

  Each token of the loss mask belongs to a segment, and no other token does.

  Args:
    level: one of `LEVELS`.
    batch: the batch, whose loss mask and ids of the level are read.
    num_turns: static, the most turns a row can have.
  """
  shape = batch.loss_mask_BL.shape
  if level == 'token':
    ids_BL = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + 1
    num = shape[1]
  elif level == 'turn':
    ids_BL, num = batch.turn_ids_BL, num_turns
  elif level == 'sentence':
    # A batch has sentence ids if `Algorithm.needs` names them.
    assert batch.sentence_ids_BL is not None
    # A row has no more sentences than tokens.
    ids_BL, num = batch.sentence_ids_BL, shape[1]
  else:
    assert level == 'sequence', level
    ids_BL, num = jnp.ones(shape, jnp.int32), 1
  return Segments(jnp.where(batch.loss_mask_BL, ids_BL, 0), num)


def _columns(ids_BL, num_segments):
  """Yields the mask [B, L] of each segment, in the order 1..T."""
  return (ids_BL == number for number in range(1, num_segments + 1))


def _totals_unrolled(x_BL, ids_BL, num_segments):
  zero_BL = jnp.zeros_like(x_BL)
  return jnp.stack(
    [
      jnp.sum(jnp.where(own_BL, x_BL, zero_BL), axis=1)
      for own_BL in _columns(ids_BL, num_segments)
    ],
    axis=1,
  )


def _spread_unrolled(x_BT, ids_BL, num_segments):
  out_BL = jnp.zeros(ids_BL.shape, x_BT.dtype)
  # The columns are slices, because the gradient of a gather would be a scatter.
  columns = jnp.split(x_BT, num_segments, axis=1)
  for own_BL, x_B1 in zip(_columns(ids_BL, num_segments), columns, strict=True):
    out_BL = jnp.where(own_BL, jnp.broadcast_to(x_B1, ids_BL.shape), out_BL)
  return out_BL


def _ids_in_range(ids_BL, num_segments):
  return jnp.where((ids_BL > 0) & (ids_BL <= num_segments), ids_BL, 0)


def _totals_segment_sum(x_BL, ids_BL, num_segments):
  """Sums numbers [B, L], or vectors [B, L, ...], over each segment."""
  num_tables = _NUM_TABLES if num_segments <= MAX_UNROLLED else 1
  # With n tables, table i sums tokens i, i + n, i + 2 n, ... Slot 0 of a table
  # takes the tokens in no segment.
  table_BL = jax.lax.broadcasted_iota(ids_BL.dtype, ids_BL.shape, 1)
  slots_BL = (table_BL % num_tables) * (num_segments + 1) + _ids_in_range(
    ids_BL, num_segments
  )
  row_tables = functools.partial(
    jax.ops.segment_sum,
    num_segments=num_tables * (num_segments + 1),
    mode='promise_in_bounds',
  )
  tables = jax.vmap(row_tables)(x_BL, slots_BL)
  tables = tables.reshape(
    len(x_BL), num_tables, num_segments + 1, *x_BL.shape[2:]
  )
  # Slot 0, which may hold NaN, is dropped.
  return jnp.sum(tables[:, :, 1:], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _spread_segment_sum(x_BT, ids_BL, num_segments):
  padded = jnp.pad(x_BT, ((0, 0), (1, 0)))  # a 0 for tokens in no segment
  return jnp.take_along_axis(
    padded,
    _ids_in_range(ids_BL, num_segments),
    axis=1,
    mode='promise_in_bounds',
  )


def _spread_forward(x_BT, ids_BL, num_segments):
  return _spread_segment_sum(x_BT, ids_BL, num_segments), ids_BL


def _spread_backward(num_segments, ids_BL, cotangent_BL):
  return _totals_segment_sum(cotangent_BL, ids_BL, num_segments), None


# The gradient that jax derives for a gather is a scatter-add into a single
# table, which is slow on CPU. The gradient defined here adds into several
# tables if there are few segments, see `_totals_segment_sum`.
_spread_segment_sum.defvjp(_spread_forward, _spread_backward)


def _broadcast_masks(ids_BL, num_segments):
  shape = (ids_BL.shape[0], num_segments, ids_BL.shape[1])
  numbers_BTL = jax.lax.broadcasted_iota(ids_BL.dtype, shape, 1) + 1
  return ids_BL[:, None, :] == numbers_BTL


def _totals_broadcast(x_BL, ids_BL, num_segments):
  own_BTL = _broadcast_masks(ids_BL, num_segments)
  return jnp.sum(jnp.where(own_BTL, x_BL[:, None, :], 0), axis=2)


def _spread_broadcast(x_BT, ids_BL, num_segments):
  own_BTL = _broadcast_masks(ids_BL, num_segments)
  # A token is in at most one segment, so at most one term of the sum is not 0.
  return jnp.sum(jnp.where(own_BTL, x_BT[:, :, None], 0), axis=1)


def _two_reductions(totals):
  def totals_and_counts(x_BL, ids_BL, num_segments):
    ones_BL = jnp.ones_like(x_BL)
    return (
      totals(x_BL, ids_BL, num_segments),
      totals(ones_BL, ids_BL, num_segments),
    )

  return totals_and_counts


def _one_scatter(x_BL, ids_BL, num_segments):
  """Returns each segment's sum and count, from one scatter of pairs (x, 1).

  A scatter of pairs is hardly slower than a scatter of single numbers.
  """
  pairs_BL2 = jnp.stack([x_BL, jnp.ones_like(x_BL)], axis=-1)
  sums_BT2 = _totals_segment_sum(pairs_BL2, ids_BL, num_segments)
  return sums_BT2[..., 0], sums_BT2[..., 1]


class Implementation(typing.NamedTuple):
  """Three functions of (numbers, ids_BL, number of segments).

  Attributes:
    totals: maps a value per token, [B, L], to the sum of each segment, [B, T].
    spread: maps a value per segment, [B, T], to the value of each token's
      segment, [B, L].
    totals_and_counts: returns the totals, and how many tokens each segment has.
  """

  totals: typing.Callable
  spread: typing.Callable
  totals_and_counts: typing.Callable


IMPLEMENTATIONS = {
  'segment_sum': Implementation(
    _totals_segment_sum, _spread_segment_sum, _one_scatter
  ),
  'unrolled': Implementation(
    _totals_unrolled, _spread_unrolled, _two_reductions(_totals_unrolled)
  ),
  'broadcast': Implementation(
    _totals_broadcast, _spread_broadcast, _two_reductions(_totals_broadcast)
  ),
}


@functools.cache
def _by_platform(accelerated: str) -> Implementation:
  """Returns `segment_sum` for CPUs, combined with another implementation.

  The choice is made when a program is lowered, for the devices of the program,
  so the program contains only one of the two implementations.

  Args:
    accelerated: the name of the implementation for all other platforms.
  """

  def choose(on_cpu, elsewhere):
    # Tracing covers both branches, whatever the platform. `jit` caches the
    # result, so both are traced once for each shape and not at every call.
    @functools.partial(jax.jit, static_argnums=2, inline=True)
    def chosen(x, ids_BL, num_segments):
      return jax.lax.platform_dependent(
        x,
        ids_BL,
        cpu=lambda x, ids_BL: on_cpu(x, ids_BL, num_segments),
        default=lambda x, ids_BL: elsewhere(x, ids_BL, num_segments),
      )

    return chosen

  return Implementation(
    *map(choose, IMPLEMENTATIONS['segment_sum'], IMPLEMENTATIONS[accelerated])
  )


def choose(num_segments: int) -> Implementation:
  """Returns the fastest implementation for a number of segments.

  Tests and benchmarks replace this function to run a single implementation.
  """
  # With one segment, `unrolled` is a plain masked sum, which is the fastest on
  # every platform.
  if num_segments == 1:
    return IMPLEMENTATIONS['unrolled']
  few = num_segments <= MAX_UNROLLED
  return _by_platform('unrolled' if few else 'broadcast')


def segment_totals(x_BL: Array, segments: Segments) -> Array:
  """Returns the sum of x over each segment: [B, T]; 0 for an empty segment."""
  return choose(segments.num).totals(x_BL, segments.ids_BL, segments.num)


def segment_counts(segments: Segments, dtype=jnp.float32) -> Array:
  """Returns the number of tokens in each segment, [B, T] of `dtype`."""
  return segment_totals(jnp.ones(segments.ids_BL.shape, dtype), segments)


def segment_spread(x_BT: Array, segments: Segments) -> Array:
  """Returns for every token its segment's x; 0 outside all segments."""
  return choose(segments.num).spread(x_BT, segments.ids_BL, segments.num)


# The gradient is written out, because jax would derive a scatter from a gather.
# The implementation is an argument, so that the forward and the backward pass
# use the same one.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _means(x_BL, ids_BL, num_segments, implementation):
  return _means_forward(x_BL, ids_BL, num_segments, implementation)[0]


def _means_forward(x_BL, ids_BL, num_segments, implementation):
  totals_BT, counts_BT = implementation.totals_and_counts(
    x_BL, ids_BL, num_segments
  )
  means_BT = masking.divide(totals_BT, counts_BT)
  means_BL = implementation.spread(means_BT, ids_BL, num_segments)
  return means_BL, (ids_BL, counts_BT)


def _means_backward(num_segments, implementation, residuals, cotangent_BL):
  """Returns segment means of the cotangents.

  The map that gives each token the mean of its segment has a symmetric matrix,
  so the map is its own transpose.
  """
  ids_BL, counts_BT = residuals
  totals_BT = implementation.totals(cotangent_BL, ids_BL, num_segments)
  means_BT = masking.divide(totals_BT, counts_BT)
  return implementation.spread(means_BT, ids_BL, num_segments), None


_means.defvjp(_means_forward, _means_backward)


def segment_means(x_BL: Array, segments: Segments) -> Array:
  """Returns for every token its segment's mean x; 0 outside all segments."""
  return _means(x_BL, segments.ids_BL, segments.num, choose(segments.num))


def segment_starts(segments: Segments) -> Array:
  """Returns a mask of the first token of each segment.

  Segment ids must not decrease in a row.
  """
  highest_BL = jax.lax.cummax(segments.ids_BL, axis=1)
  before_BL = jnp.pad(highest_BL[:, :-1], ((0, 0), (1, 0)))
  return segments.ids_BL > before_BL
