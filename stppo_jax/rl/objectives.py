"""Objectives: a token's term of the loss, inside and outside the bounds.

B trajectories, L tokens. An objective is called `objective(ratio_BL,
logprobs_BL, advantages_BL, low, high, **options)` with arrays that are finite
everywhere. It returns (term_BL, cut_BL): the term to be minimised, and a mask
of the tokens whose gradient it cut.

In `detached`, `masked` and `unclipped` the ratio is a detached weight and the
gradient is that of log pi of the token itself. The option `ratio.gradient`,
which says where the gradient of the ratio goes, therefore does not change them.
"""

import jax
import jax.numpy as jnp

from stppo_jax.rl import options as options_lib

Array = jax.Array
sg = jax.lax.stop_gradient


def pessimistic(
  ratio_BL: Array,
  logprobs_BL: Array,
  advantages_BL: Array,
  low: Array | float,
  high: Array | float,
) -> tuple[Array, Array]:
  """Returns max(-A r, -A clip(r, low, high)), the objective of PPO.

  A token is cut where r is above high with A > 0, or below low with A < 0.
  Source: arXiv 1707.06347 Eq. 7.
  """
  del logprobs_BL
  above_BL, below_BL = _harmful(ratio_BL, advantages_BL, low, high)
  # These selections have the value of max and clip. But where the ratio lies
  # exactly on a bound, they keep the whole gradient; max and clip keep half.
  trusted_BL = jnp.where(above_BL, high, jnp.where(below_BL, low, ratio_BL))
  return -advantages_BL * trusted_BL, above_BL | below_BL


@options_lib.dataclass
class DualClip(options_lib.Named):
  """Options of `dual_clip`.

  Attributes:
    c: the largest ratio that counts where A < 0.
  """

  c: float = options_lib.number(above=1.0)


def dual_clip(
  ratio_BL: Array,
  logprobs_BL: Array,
  advantages_BL: Array,
  low: Array | float,
  high: Array | float,
  *,
  c: Array | float,
) -> tuple[Array, Array]:
  """Returns the pessimistic term, at most -c A where A < 0.

  A token is cut as in `pessimistic`, and where r is above c with A < 0.
  Source: arXiv 1912.09729 Eq. 5.
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
  """Returns -sg(clip(r, low, high)) A log pi, the objective of CISPO.

  The weight is clipped and no gradient is cut. Source: arXiv 2506.13585 Eq. 4.
  """
  # Detached: the weight corrects for the old policy and has no gradient.
  weight_BL = sg(jnp.clip(ratio_BL, low, high))
  return _weighted(weight_BL, logprobs_BL, advantages_BL), _none(ratio_BL)


def masked(
  ratio_BL: Array,
  logprobs_BL: Array,
  advantages_BL: Array,
  low: Array | float,
  high: Array | float,
) -> tuple[Array, Array]:
  """Returns -M sg(r) A log pi, the objective of MiniRL.

  M is 0 where r is above high with A > 0, or below low with A < 0; else 1.
  Source: arXiv 2512.01374.
  """
  above_BL, below_BL = _harmful(ratio_BL, advantages_BL, low, high)
  cut_BL = above_BL | below_BL
  # Detached as in `detached`.
  weight_BL = sg(jnp.where(cut_BL, 0, ratio_BL))
  return _weighted(weight_BL, logprobs_BL, advantages_BL), cut_BL


def unclipped(
  ratio_BL: Array,
  logprobs_BL: Array,
  advantages_BL: Array,
  low: Array | float,
  high: Array | float,
) -> tuple[Array, Array]:
  """Returns -sg(r) A log pi, the off-policy gradient, which cuts nothing."""
  del low, high
  # Detached as in `detached`.
  weight_BL = sg(ratio_BL)
  return _weighted(weight_BL, logprobs_BL, advantages_BL), _none(ratio_BL)


def _harmful(ratio_BL, advantages_BL, low, high):
  """Returns masks of ratios above high with A > 0, and below low with A < 0."""
  above_BL = (ratio_BL > high) & (advantages_BL > 0)
  below_BL = (ratio_BL < low) & (advantages_BL < 0)
  return above_BL, below_BL


def _weighted(weight_BL, logprobs_BL, advantages_BL):
  return -weight_BL * advantages_BL * logprobs_BL


def _none(ratio_BL):
  return jnp.zeros(ratio_BL.shape, bool)


OBJECTIVES = {
  'pessimistic': options_lib.Choice(pessimistic),
  'dual_clip': options_lib.Choice(dual_clip, DualClip),
  'detached': options_lib.Choice(detached),
  'masked': options_lib.Choice(masked),
  'unclipped': options_lib.Choice(unclipped),
}
