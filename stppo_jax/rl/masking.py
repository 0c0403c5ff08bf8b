"""Reductions over the tokens that a mask selects, and comparisons in groups.

B trajectories, L tokens. Every function selects before it computes:
`mask * nan` is nan, in the gradient too, while `where(mask, x, 0)` is not.
An empty mask gives 0, never NaN. What is compared in groups is a vector; a
square mask says which pairs of its elements are in one group.
"""

import jax
import jax.numpy as jnp

Array = jax.Array

WHITEN_EPSILON = 1e-8  # added to the variance


def select(x_BL: Array, mask_BL: Array) -> Array:
  """Returns x where the mask is true, else 0."""
  return jnp.where(mask_BL, x_BL, jnp.zeros_like(x_BL))


def divide(total: Array, count: Array) -> Array:
  """Returns total / count, and 0 where the count is 0."""
  some = count > 0
  return jnp.where(some, total, 0) / jnp.where(some, count, 1)


def masked_total(
  x_BL: Array, mask_BL: Array, *, axis: int | None = None
) -> tuple[Array, Array]:
  """Returns the sum over the mask and the number of tokens in it.

  Returns:
    (total, count), both of x's dtype: scalars, or reduced along `axis`. A
    float32 count is exact up to 2**24 tokens.
  """
  total = jnp.sum(select(x_BL, mask_BL), axis=axis)
  return total, jnp.sum(mask_BL, axis=axis, dtype=x_BL.dtype)


def masked_mean(x_BL: Array, mask_BL: Array) -> Array:
  """Returns the mean of x over the mask, a scalar."""
  return divide(*masked_total(x_BL, mask_BL))


def masked_moments(x_BL: Array, mask_BL: Array) -> tuple[Array, Array]:
  """Returns mean and unbiased variance (over count - 1) of x over the mask.

  The variance of fewer than two values is 0.
  """
  total, count = masked_total(x_BL, mask_BL)
  mean = divide(total, count)
  deviation_BL = select(x_BL, mask_BL) - mean
  squares, _ = masked_total(jnp.square(deviation_BL), mask_BL)
  return mean, divide(squares, jnp.maximum(count - 1, 0))


def whiten(x_BL: Array, mask_BL: Array) -> Array:
  """Returns (x - mean) / sqrt(variance + 1e-8) over the mask, 0 elsewhere."""
  mean, variance = masked_moments(x_BL, mask_BL)
  white_BL = (select(x_BL, mask_BL) - mean) * jax.lax.rsqrt(
    variance + WHITEN_EPSILON
  )
  return select(white_BL, mask_BL)


def response_mask(loss_mask_BL: Array) -> Array:
  """Returns a mask from each row's first policy token to its last."""
  policy_BL = loss_mask_BL.astype(jnp.int32)
  begun_BL = jax.lax.cummax(policy_BL, axis=1) > 0
  to_come_BL = jax.lax.cummax(policy_BL, axis=1, reverse=True) > 0
  return begun_BL & to_come_BL


def last_mask(loss_mask_BL: Array) -> Array:
  """Returns a mask of each row's last policy token."""
  count_BL = jnp.cumsum(loss_mask_BL.astype(jnp.int32), axis=1)
  total_B1 = jnp.max(count_BL, axis=1, keepdims=True)
  return loss_mask_BL & (count_BL == total_B1)


def imitated(
  rewards_BL: Array, loss_mask_BL: Array, least: Array | float
) -> Array:
  """Returns the policy tokens of rows whose last reward is `least` or more."""
  outcome_BL = jnp.where(last_mask(loss_mask_BL), rewards_BL, -jnp.inf)
  return loss_mask_BL & jnp.any(outcome_BL >= least, axis=1, keepdims=True)


# 'all' takes mean and variance over observation tokens too, as the reference
# implementation of arXiv 2511.20718 does.
WHITENS = {
  'none': lambda x_BL, mask_BL: x_BL,
  'policy': whiten,
  'all': lambda x_BL, mask_BL: whiten(x_BL, response_mask(mask_BL)),
}


def pairs_of(ids: Array, present: Array) -> Array:
  """Returns a square mask of the pairs (i, j) that are present in one group."""
  both = present[:, None] & present[None, :]
  return both & (ids[:, None] == ids[None, :])


def differences(x: Array, pairs: Array) -> tuple[Array, Array]:
  """Returns the sum of x_i - x_j over i's group, and the group's size."""
  total = jnp.sum(select(x[:, None] - x[None, :], pairs), axis=1)
  return total, jnp.sum(pairs, axis=1, dtype=x.dtype)


def centered(x: Array, pairs: Array, epsilon: Array | float) -> Array:
  """Returns x - mean, over the group."""
  del epsilon
  return divide(*differences(x, pairs))


def standardized(x: Array, pairs: Array, epsilon: Array | float) -> Array:
  """Returns (x - mean) / (std + epsilon), with the unbiased variance."""
  total, count = differences(x, pairs)
  centered_x = divide(total, count)
  squares = jnp.sum(
    select(
      jnp.broadcast_to(jnp.square(centered_x)[None, :], pairs.shape),
      pairs,
    ),
    axis=1,
  )
  variance = divide(squares, jnp.maximum(count - 1, 0))
  # The square root has an infinite slope at 0. So where the variance is 0, the
  # root of 1 is computed instead and then replaced by 0.
  some = variance > 0
  std = select(jnp.sqrt(jnp.where(some, variance, 1)), some)
  return divide(centered_x, std + epsilon)


# The difference from the group's mean is divided by std + epsilon, or not.
NORMALIZATIONS = {'std': standardized, 'none': centered}
