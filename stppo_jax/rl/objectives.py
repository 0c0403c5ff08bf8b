"""What a token contributes to the loss, inside and outside the bounds.

An objective is called `objective(ratio_BL, logprobs_BL, advantages_BL, low,
high, **options)` with arrays that are finite everywhere, and returns the term
to be minimised and the mask of the tokens whose gradient it cut.
"""

import jax
import jax.numpy as jnp

Array = jax.Array


def pessimistic(
  ratio_BL: Array,
  logprobs_BL: Array,
  advantages_BL: Array,
  low: Array | float,
  high: Array | float,
) -> tuple[Array, Array]:
  """PPO: max(-A r, -A clip(r, low, high)) (arXiv 1707.06347 Eq. 7).

  Written as a selection, which has the same value and at a ratio exactly on
  a bound keeps the whole gradient, where max and clip would share it out.

  Returns:
    (term_BL, cut_BL); cut where r is above high with A > 0, or below low
    with A < 0.
  """
  del logprobs_BL
  above_BL = (ratio_BL > high) & (advantages_BL > 0)
  below_BL = (ratio_BL < low) & (advantages_BL < 0)
  trusted_BL = jnp.where(above_BL, high, jnp.where(below_BL, low, ratio_BL))
  return -advantages_BL * trusted_BL, above_BL | below_BL


OBJECTIVES = {'pessimistic': pessimistic}
