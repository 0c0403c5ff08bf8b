"""What a token contributes to the loss, inside and outside the bounds.

An objective is called `objective(ratio_BL, logprobs_BL, advantages_BL, low,
high, **options)` with arrays that are finite everywhere, and returns the term
to be minimised and the mask of the tokens whose gradient it cut.

In the last three the ratio is a weight, detached, and the gradient is that of
log pi of the token itself: where the ratio's own gradient goes
(`ratio.gradient`) does not matter to them.
"""

import jax
import jax.numpy as jnp

Array = jax.Array
sg = jax.lax.stop_gradient


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
  above_BL, below_BL = _harmful(ratio_BL, advantages_BL, low, high)
  trusted_BL = jnp.where(above_BL, high, jnp.where(below_BL, low, ratio_BL))
  return -advantages_BL * trusted_BL, above_BL | below_BL


def dual_clip(
  ratio_BL: Array,
  logprobs_BL: Array,
  advantages_BL: Array,
  low: Array | float,
  high: Array | float,
  *,
  c: Array | float,
) -> tuple[Array, Array]:
  """Pessimistic, and at most -c A where A < 0 (arXiv 1912.09729 Eq. 5).

  Returns:
    (term_BL, cut_BL); cut also where r is above c > 1 with A < 0.
  """
  term_BL, cut_BL = pessimistic(ratio_BL, logprobs_BL, advantages_BL, low, high)
  far_BL = (advantages_BL < 0) & (ratio_BL > c)
  return jnp.where(far_BL, -advantages_BL * c, term_BL), cut_BL | far_BL


def detached(
  ratio_BL: Array,
  logprobs_BL: Array,
  advantages_BL: Array,
  low: Array | float,
  high: Array | float,
) -> tuple[Array, Array]:
  """CISPO: -sg(clip(r, low, high)) A log pi (arXiv 2506.13585 Eq. 4).

  The weight is clipped, no gradient is cut.
  """
  # The weight corrects for the old policy; it is not what is learned.
  weight_BL = sg(jnp.clip(ratio_BL, low, high))
  return _weighted(weight_BL, logprobs_BL, advantages_BL), _none(ratio_BL)


def masked(
  ratio_BL: Array,
  logprobs_BL: Array,
  advantages_BL: Array,
  low: Array | float,
  high: Array | float,
) -> tuple[Array, Array]:
  """MiniRL: -M sg(r) A log pi (arXiv 2512.01374).

  M is 0 on the side of the bounds that the sign of A makes harmful: above
  high with A > 0, below low with A < 0.
  """
  above_BL, below_BL = _harmful(ratio_BL, advantages_BL, low, high)
  cut_BL = above_BL | below_BL
  # As in `detached`.
  weight_BL = sg(jnp.where(cut_BL, 0, ratio_BL))
  return _weighted(weight_BL, logprobs_BL, advantages_BL), cut_BL


def unclipped(
  ratio_BL: Array,
  logprobs_BL: Array,
  advantages_BL: Array,
  low: Array | float,
  high: Array | float,
) -> tuple[Array, Array]:
  """-sg(r) A log pi: the off-policy gradient, nothing cut."""
  del low, high
  # As in `detached`.
  weight_BL = sg(ratio_BL)
  return _weighted(weight_BL, logprobs_BL, advantages_BL), _none(ratio_BL)


def _harmful(ratio_BL, advantages_BL, low, high):
  """(above, below): where moving on would widen the gap for the worse."""
  above_BL = (ratio_BL > high) & (advantages_BL > 0)
  below_BL = (ratio_BL < low) & (advantages_BL < 0)
  return above_BL, below_BL


def _weighted(weight_BL, logprobs_BL, advantages_BL):
  return -weight_BL * advantages_BL * logprobs_BL


def _none(ratio_BL):
  return jnp.zeros(ratio_BL.shape, bool)


OBJECTIVES = {
  'pessimistic': pessimistic,
  'dual_clip': dual_clip,
  'detached': detached,
  'masked': masked,
  'unclipped': unclipped,
}
