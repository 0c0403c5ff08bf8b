"""Rotary positions.

The pair i of a head of size H turns by position * theta^(-2i / H). Scaling
slows the turning down, for texts longer than those a model first learned from:
'linear' all pairs alike (Chen et al. 2023), 'llama3' those that turn less than
once in the original length (Dubey et al. 2024).
"""

from collections.abc import Callable
from collections.abc import Mapping
import math

import jax
import jax.numpy as jnp

from stppo_jax.models import config as model_config

Array = jax.Array


def rotation(
  config: model_config.ModelConfig, positions_BL: Array
) -> tuple[Array, Array]:
  """cos and sin [B, L, 1, H/2] of the rotary angles."""
  turning = frequencies(config)[None, None, None]
  angles = positions_BL[:, :, None, None] * turning
  return jnp.cos(angles), jnp.sin(angles)


def frequencies(config: model_config.ModelConfig) -> Array:
  """Radians per token of each pair, [H/2] float32."""
  half = config.head_dim // 2
  exponents = jnp.arange(half, dtype=jnp.float32) / half
  plain = config.rope_theta**-exponents
  scaling = config.rope_scaling
  return _SCALED[scaling.rope_type](plain, scaling) if scaling else plain


def _linear(plain: Array, scaling: model_config.RopeScaling) -> Array:
  return plain / scaling.factor


def _llama3(plain: Array, scaling: model_config.RopeScaling) -> Array:
  """Slow pairs are scaled, fast ones are not, between them is a ramp.

  What counts is the number of turns within the original length: at most
  low_freq_factor is slow, at least high_freq_factor is fast.
  """
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  turns = plain * scaling.original_max_position_embeddings / (2 * math.pi)
  kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
  return plain * (kept + (1.0 - kept) / scaling.factor)


_SCALED: Mapping[str, Callable[..., Array]] = {
  'linear': _linear,
  'llama3': _llama3,
}


def rotate(x_BLNH: Array, rotation: tuple[Array, Array]) -> Array:
  """Rotary positions: halves (a, b) -> (a cos - b sin, b cos + a sin)."""
  cos, sin = (part.astype(x_BLNH.dtype) for part in rotation)
  a, b = jnp.split(x_BLNH, 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
