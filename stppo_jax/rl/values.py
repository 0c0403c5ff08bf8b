"""The loss of a value model, and the targets of categorical values.

B trajectories, L tokens, Y bins of a categorical value.
"""

import typing

import chex
import jax
import jax.numpy as jnp

from stppo_jax.rl import masking

Array = jax.Array
sg = jax.lax.stop_gradient


class ValueLoss(typing.NamedTuple):
  """Sums of the value loss; the loss is total / the minibatch's count.

  Attributes:
    total: the sum of the terms.
    count: the number of tokens at which the value model is trained.
    clipped: the number of these tokens at which the clipped V is further from
      the target than V is.
  """

  total: Array
  count: Array
  clipped: Array


def value_loss(
  values_BL: Array,
  old_values_BL: Array | None,
  returns_BL: Array,
  value_mask_BL: Array,
  *,
  clip: Array | float,
  weights_BL: Array | None = None,
  bounds: tuple[float, float] | None = None,
  logprobs_BLY: Array | None = None,
) -> ValueLoss:
  """Returns the clipped value loss of PPO, summed over tokens.

    max(d(v, R), d(clip(v, v_old - c, v_old + c), R))

  The distance d is 0.5 (v - R)^2. With bounds (low, high), R and v are mapped
  to probabilities (x - low) / (high - low), and d is their cross-entropy.

  A categorical value is the mean of a distribution over bins. Its term is the
  cross-entropy between the target `two_hot` and this distribution, without
  clip. Where |clip(v) - R| > |v - R|, the term has no gradient.

  Args:
    values_BL: V of the value model in training, differentiable.
    old_values_BL: V before the first update; None: values are not clipped.
    returns_BL: the targets R.
    value_mask_BL: bool, the tokens at which the value model is trained.
    clip: c, the greatest trusted distance from the old value.
    weights_BL: multiplier of the terms, `PolicyLoss.value_weights_BL`. The
      count does not depend on it. With None all weights are 1.
    bounds: (low, high), the range of the values and the targets, or None.
    logprobs_BLY: the logarithms of the probabilities of Y bins, differentiable,
      for a categorical value, which has bounds; otherwise None.
  """
  chex.assert_equal_shape([values_BL, returns_BL, value_mask_BL])
  values_BL = masking.select(values_BL, value_mask_BL)
  # Old values and targets are data, so they get no gradient.
  returns_BL = sg(masking.select(returns_BL, value_mask_BL))
  near_BL = values_BL
  if old_values_BL is not None:
    old_BL = sg(masking.select(old_values_BL, value_mask_BL))
    near_BL = jnp.clip(values_BL, old_BL - clip, old_BL + clip)
  distance_bounds = bounds if logprobs_BLY is None else None
  plain_BL = _distance(values_BL, returns_BL, distance_bounds)
  clipped_BL = _distance(near_BL, returns_BL, distance_bounds)
  # max() is not used: at a tie it would give each side half the gradient.
  larger_BL = clipped_BL > plain_BL
  if logprobs_BLY is not None:
    assert bounds is not None
    target_BLY = two_hot(returns_BL, bounds, logprobs_BLY.shape[-1])
    plain_BL = -jnp.sum(target_BLY * logprobs_BLY, axis=-1)
    clipped_BL = sg(plain_BL)
  term_BL = jnp.where(larger_BL, clipped_BL, plain_BL)
  if weights_BL is not None:
    term_BL = sg(weights_BL) * term_BL
  total, count = masking.masked_total(term_BL, value_mask_BL)
  clipped, _ = masking.masked_total(
    larger_BL.astype(values_BL.dtype), value_mask_BL
  )
  return ValueLoss(total, count, clipped)


def two_hot(x_BL: Array, bounds: tuple[float, float], count: int) -> Array:
  """Returns two-hot targets [B, L, Y] for categorical values; Y is `count`.

  A number between two bins gets two weights, for these two bins. They sum to 1,
  and the mean of the bins' values with these weights is the number. A number
  outside of the bounds counts as the nearest bound.

  Args:
    x_BL: the numbers.
    bounds: the values of the first and of the last bin; the values of the
      others are at equal distances between them.
    count: the number of bins.
  """
  low, high = bounds
  place_BL = (jnp.clip(x_BL, low, high) - low) / (high - low) * (count - 1)
  bins_11Y = jnp.arange(count)[None, None]
  return jnp.maximum(1 - jnp.abs(place_BL[..., None] - bins_11Y), 0)


def _distance(values_BL, returns_BL, bounds) -> Array:
  """Returns the distance d of values from their targets, see `value_loss`."""
  if bounds is None:
    return 0.5 * jnp.square(values_BL - returns_BL)
  low, high = bounds
  share = lambda x_BL: jnp.clip((x_BL - low) / (high - low), 0, 1)
  # The probability is kept away from 0 and 1, where the logarithm is infinite,
  # by scaling it. Clipping it would leave no gradient.
  p_BL, q_BL = 1e-6 + (1 - 2e-6) * share(values_BL), share(returns_BL)
  return -q_BL * jnp.log(p_BL) - (1 - q_BL) * jnp.log1p(-p_BL)
