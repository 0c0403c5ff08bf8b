"""Reductions over the tokens that a mask selects, and comparisons in groups.

B trajectories, L tokens. Every function selects before it computes:
`mask * nan` is nan, in the gradient too, while `where(mask, x, 0)` is 0 off the
mask. An empty mask gives 0, never NaN. Comparisons in groups take a vector, and
a square mask that says which pairs of its elements belong to one group.
"""

import jax
import jax.numpy as jnp

Array = jax.Array

WHITEN_EPSILON = 1e-8  # added to the variance by `whiten`


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
  """Returns the sum over the mask and the number of tokens in the mask.

  Returns:
    (total, count), both of x's dtype. They are scalars or, with an axis, arrays
    without that axis. A float32 count is exact up to 2**24 tokens.
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
  """Returns a mask that covers each row's first to last policy token."""
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
  """Returns a mask of the policy tokens of rows with an outcome >= `least`.

  The outcome is the reward on the row's last policy token.
  """
  outcome_BL = jnp.where(last_mask(loss_mask_BL), rewards_BL, -jnp.inf)
  return loss_mask_BL & jnp.any(outcome_BL >= least, axis=1, keepdims=True)


# Maps a name to a function that whitens advantages. 'all' also includes
# observation tokens in mean and variance, as the reference implementation of
# arXiv 2511.20718 does.
WHITENS = {
  'none': lambda x_BL, mask_BL: x_BL,
  'policy': whiten,
  'all': lambda x_BL, mask_BL: whiten(x_BL, response_mask(mask_BL)),
}


def pairs_of(ids: Array, present: Array) -> Array:
  """Returns a square mask of the pairs of present elements with equal ids."""
  both = present[:, None] & present[None, :]
  return both & (ids[:, None] == ids[None, :])


def differences(x: Array, pairs: Array) -> tuple[Array, Array]:
  """Returns a sum of differences for each element, and its group's size.

  The sum for element i is the sum of x_i - x_j over all j of the group of i.
  """
  total = jnp.sum(select(x[:, None] - x[None, :], pairs), axis=1)
  return total, jnp.sum(pairs, axis=1, dtype=x.dtype)


def centered(x: Array, pairs: Array, epsilon: Array | float) -> Array:
  """Returns x - mean, with the mean over each element's group."""
  del epsilon
  return divide(*differences(x, pairs))


def standardized(x: Array, pairs: Array, epsilon: Array | float) -> Array:
  """Returns (x - mean) / (std + epsilon) in each group, with unbiased std."""
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
  # The square root has an infinite slope at 0. If a variance is 0, the root of
  # 1 is computed instead and then replaced by 0.
  some = variance > 0
  std = select(jnp.sqrt(jnp.where(some, variance, 1)), some)
  return divide(centered_x, std + epsilon)


# 'std' divides the difference from the group's mean by std + epsilon, and
# 'none' does not divide it.
NORMALIZATIONS = {'std': standardized, 'none': centered}
