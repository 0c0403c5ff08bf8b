"""How tokens become a scalar.

B trajectories, L tokens, T turns. Every aggregate is a weighted sum over the
loss mask divided by a count, where weights and count depend on the masks
only:

  token_mean     weight 1                    count: tokens
  turn_mean      1 / tokens of the turn      count: turns with a token
  sequence_mean  1 / tokens of the row       count: rows with a token

Totals and counts add up over microbatches and devices. Divide once, by the
count of the whole minibatch, and cutting the batch changes nothing.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from stppo_jax.rl import masking
from stppo_jax.rl import segments as segments_lib

Array = jax.Array


def _mean_over(level: str) -> Callable[..., tuple[Array, Array]]:
  """Each segment of the level counts once, its tokens share it equally."""

  def weigh(turn_ids_BL, loss_mask_BL, dtype, *, num_turns, implementation):
    segments = segments_lib.segment_ids(
      level, turn_ids_BL, loss_mask_BL, num_turns=num_turns
    )
    counts_BT = segments_lib.segment_counts(
      segments, dtype, implementation=implementation
    )
    weights_BL = segments_lib.segment_spread(
      masking.divide(jnp.ones_like(counts_BT), counts_BT),
      segments,
      implementation=implementation,
    )
    return weights_BL, jnp.sum(counts_BT > 0, dtype=dtype)

  return weigh


def _token_mean(turn_ids_BL, loss_mask_BL, dtype, *, num_turns, implementation):
  del turn_ids_BL, num_turns, implementation
  return loss_mask_BL.astype(dtype), jnp.sum(loss_mask_BL, dtype=dtype)


AGGREGATES = {
  'token_mean': _token_mean,
  'turn_mean': _mean_over('turn'),
  'sequence_mean': _mean_over('sequence'),
}


def aggregate_weights(
  turn_ids_BL: Array,
  loss_mask_BL: Array,
  dtype=jnp.float32,
  *,
  name: str,
  num_turns: int,
  implementation: str = 'auto',
) -> tuple[Array, Array]:
  """The weight of every token [B, L] (0 off the mask) and the count."""
  return AGGREGATES[name](
    turn_ids_BL,
    loss_mask_BL,
    dtype,
    num_turns=num_turns,
    implementation=implementation,
  )


def aggregate(
  x_BL: Array,
  turn_ids_BL: Array,
  loss_mask_BL: Array,
  *,
  name: str,
  num_turns: int,
  implementation: str = 'auto',
) -> tuple[Array, Array]:
  """(total, count) of x; the aggregate is `total / count`."""
  weights_BL, count = aggregate_weights(
    turn_ids_BL,
    loss_mask_BL,
    x_BL.dtype,
    name=name,
    num_turns=num_turns,
    implementation=implementation,
  )
  return jnp.sum(weights_BL * masking.select(x_BL, loss_mask_BL)), count


def aggregate_count(
  turn_ids_BL: Array,
  loss_mask_BL: Array,
  dtype=jnp.float32,
  *,
  name: str,
  num_turns: int,
  implementation: str = 'auto',
) -> Array:
  """The count alone, from the masks of a (whole) minibatch."""
  _, count = aggregate_weights(
    turn_ids_BL,
    loss_mask_BL,
    dtype,
    name=name,
    num_turns=num_turns,
    implementation=implementation,
  )
  return count
