"""Reductions over the slots a mask selects.

B trajectories, L tokens. Every function selects before it computes:
`mask * nan` is nan, in the gradient too, while `where(mask, x, 0)` is not.
An empty mask gives 0, never NaN.
"""

import jax
import jax.numpy as jnp

Array = jax.Array

WHITEN_EPSILON = 1e-8  # added to the variance


def select(x_BL: Array, mask_BL: Array) -> Array:
  """x where the mask is true, else 0."""
  return jnp.where(mask_BL, x_BL, jnp.zeros_like(x_BL))


def divide(total: Array, count: Array) -> Array:
  """total / count, and 0 where the count is 0."""
  some = count > 0
  return jnp.where(some, total, 0) / jnp.where(some, count, 1)


def masked_total(
  x_BL: Array, mask_BL: Array, *, axis: int | None = None
) -> tuple[Array, Array]:
  """The sum over the mask and the number of slots in it, both in x's dtype.

  A float32 count is exact up to 2**24 tokens.

  Returns:
    (total, count), scalars, or reduced along `axis`.
  """
  total = jnp.sum(select(x_BL, mask_BL), axis=axis)
  return total, jnp.sum(mask_BL, axis=axis, dtype=x_BL.dtype)


def masked_mean(x_BL: Array, mask_BL: Array) -> Array:
  """The mean over the mask."""
  return divide(*masked_total(x_BL, mask_BL))


def masked_moments(x_BL: Array, mask_BL: Array) -> tuple[Array, Array]:
  """Mean and unbiased variance (divided by count - 1) over the mask.

  The variance of fewer than two values is 0.
  """
  total, count = masked_total(x_BL, mask_BL)
  mean = divide(total, count)
  deviation_BL = select(x_BL, mask_BL) - mean
  squares, _ = masked_total(jnp.square(deviation_BL), mask_BL)
  return mean, divide(squares, jnp.maximum(count - 1, 0))


def whiten(x_BL: Array, mask_BL: Array) -> Array:
  """(x - mean) / sqrt(variance + 1e-8) over the mask, 0 elsewhere."""
  mean, variance = masked_moments(x_BL, mask_BL)
  white_BL = (select(x_BL, mask_BL) - mean) * jax.lax.rsqrt(
    variance + WHITEN_EPSILON
  )
  return select(white_BL, mask_BL)
