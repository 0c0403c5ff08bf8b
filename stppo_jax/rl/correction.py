"""What one correction asks for."""

import typing

import jax
import jax.numpy as jnp

Array = jax.Array


class Correction(typing.NamedTuple):
  """Multipliers and a bias, all detached, [B, L].

  Attributes:
    weights_BL: multiplier of the policy terms.
    value_weights_BL: multiplier of the value terms.
    bias_BL: factor of log pi in the bias whose gradient is c, see
      `clipping_bias`.
  """

  weights_BL: Array
  value_weights_BL: Array
  bias_BL: Array


def of_policy(weights_BL: Array) -> Correction:
  """Multiplies the policy terms and nothing else."""
  return Correction(
    # A weight measures; it is not what is learned.
    jax.lax.stop_gradient(weights_BL),
    jnp.ones_like(weights_BL),
    jnp.zeros_like(weights_BL),
  )
