"""Sums over the segments of a row, and the way back to its tokens.

B trajectories, L tokens, T segments of a row. `ids_BL` says to which segment
a token belongs: 1..T, and 0 for none. Token, turn and sequence level differ
in the ids only.

Two implementations give the same numbers:

  segment_sum: a scatter-add, vmapped over rows. (One flat table of B * T
    segments would be all-reduced whole on a mesh.) The fastest on CPU.
  unrolled: one masked reduction per segment, unrolled over the static T. No
    scatter, neither in the value nor in the gradient, so it is deterministic
    and fast on GPU and TPU.

An id above T is a caller's error; its token then counts as in no segment.
"""

import functools
import typing

import jax
import jax.numpy as jnp

Array = jax.Array

MAX_UNROLLED = 32


class Segments(typing.NamedTuple):
  """Segment ids [B, L] and the static number of segments."""

  ids_BL: Array
  num: int


def _token(turn_ids_BL, loss_mask_BL, num_turns):
  del num_turns
  length = turn_ids_BL.shape[1]
  numbers_BL = jax.lax.broadcasted_iota(jnp.int32, turn_ids_BL.shape, 1) + 1
  return Segments(jnp.where(loss_mask_BL, numbers_BL, 0), length)


def _turn(turn_ids_BL, loss_mask_BL, num_turns):
  return Segments(jnp.where(loss_mask_BL, turn_ids_BL, 0), num_turns)


def _sequence(turn_ids_BL, loss_mask_BL, num_turns):
  del turn_ids_BL, num_turns
  return Segments(loss_mask_BL.astype(jnp.int32), 1)


LEVELS = {'token': _token, 'turn': _turn, 'sequence': _sequence}


def segment_ids(
  level: str, turn_ids_BL: Array, loss_mask_BL: Array, *, num_turns: int
) -> Segments:
  """The segments of a level: every token of the loss mask is in one.

  Args:
    level: a key of `LEVELS`.
    turn_ids_BL: int, 0 or 1..num_turns.
    loss_mask_BL: bool, written by the policy and to be trained on.
    num_turns: static, the most turns a row can have.
  """
  return LEVELS[level](turn_ids_BL, loss_mask_BL, num_turns)


def _columns(ids_BL, num_segments):
  """The mask of each segment in turn."""
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
  columns = jnp.split(x_BT, num_segments, axis=1)  # slices: no gather
  for own_BL, x_B1 in zip(_columns(ids_BL, num_segments), columns, strict=True):
    out_BL = jnp.where(own_BL, jnp.broadcast_to(x_B1, ids_BL.shape), out_BL)
  return out_BL


def _known(ids_BL, num_segments):
  return jnp.where(ids_BL <= num_segments, ids_BL, 0)


def _totals_segment_sum(x_BL, ids_BL, num_segments):
  ids_BL = _known(ids_BL, num_segments)
  row_total = functools.partial(
    jax.ops.segment_sum, num_segments=num_segments + 1
  )
  totals = jax.vmap(row_total)(x_BL, ids_BL)
  # Segment 0, which may hold NaN, is dropped whole.
  return jax.lax.slice_in_dim(totals, 1, num_segments + 1, axis=1)


def _spread_segment_sum(x_BT, ids_BL, num_segments):
  padded = jnp.pad(x_BT, ((0, 0), (1, 0)))  # segment 0 reads 0
  return jnp.take_along_axis(padded, _known(ids_BL, num_segments), axis=1)


class _Implementation(typing.NamedTuple):
  totals: typing.Callable
  spread: typing.Callable


IMPLEMENTATIONS = {
  'segment_sum': _Implementation(_totals_segment_sum, _spread_segment_sum),
  'unrolled': _Implementation(_totals_unrolled, _spread_unrolled),
}


def _choose(implementation: str, num_segments: int) -> _Implementation:
  if implementation == 'auto':
    # One segment is a plain masked sum: unrolled wins everywhere.
    unrolled = num_segments == 1 or (
      jax.default_backend() != 'cpu' and num_segments <= MAX_UNROLLED
    )
    implementation = 'unrolled' if unrolled else 'segment_sum'
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f'unknown implementation {implementation!r}; choices: auto, '
      + ', '.join(IMPLEMENTATIONS)
    )
  if implementation == 'unrolled' and num_segments > MAX_UNROLLED:
    raise ValueError(
      f'unrolled over {num_segments} segments; at most {MAX_UNROLLED}'
    )
  return IMPLEMENTATIONS[implementation]


def segment_totals(
  x_BL: Array, segments: Segments, *, implementation: str = 'auto'
) -> Array:
  """The sum of x over each segment: [B, T]; an empty segment gives 0.

  Raises:
    ValueError: unknown implementation, or too many segments to unroll.
  """
  chosen = _choose(implementation, segments.num)
  return chosen.totals(x_BL, segments.ids_BL, segments.num)


def segment_counts(
  segments: Segments, dtype=jnp.float32, *, implementation: str = 'auto'
) -> Array:
  """The number of tokens in each segment: [B, T], of a floating dtype."""
  ones_BL = jnp.ones(segments.ids_BL.shape, dtype)
  return segment_totals(ones_BL, segments, implementation=implementation)


def segment_spread(
  x_BT: Array, segments: Segments, *, implementation: str = 'auto'
) -> Array:
  """Gives every token its segment's value: [B, L]; 0 outside all segments."""
  chosen = _choose(implementation, segments.num)
  return chosen.spread(x_BT, segments.ids_BL, segments.num)


def segment_starts(segments: Segments) -> Array:
  """True at the first token of each segment; ids must not decrease in a row."""
  highest_BL = jax.lax.cummax(segments.ids_BL, axis=1)
  before_BL = jnp.pad(highest_BL[:, :-1], ((0, 0), (1, 0)))
  return segments.ids_BL > before_BL
