"""Rotary positions."""

import jax
import jax.numpy as jnp

from stppo_jax.models import config as model_config

Array = jax.Array


def rotation(
  config: model_config.ModelConfig, positions_BL: Array
) -> tuple[Array, Array]:
  """cos and sin [B, L, 1, H/2] of the rotary angles."""
  half = config.head_dim // 2
  exponents = jnp.arange(half, dtype=jnp.float32) / half
  frequencies = config.rope_theta**-exponents
  angles = positions_BL[:, :, None, None] * frequencies[None, None, None]
  return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BLNH: Array, rotation: tuple[Array, Array]) -> Array:
  """Rotary positions: halves (a, b) -> (a cos - b sin, b cos + a sin)."""
  cos, sin = (part.astype(x_BLNH.dtype) for part in rotation)
  a, b = jnp.split(x_BLNH, 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
