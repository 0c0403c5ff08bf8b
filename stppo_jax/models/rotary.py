"""Rotates queries and keys by positions (Su et al., 2021, arXiv 2104.09864).

B rows, L tokens, N heads of queries or of keys, H head size. Numbers i and
i + H/2 of a head are a pair, which turns by the angle
position * theta^(-2i / H). For texts longer than those that a model was first
trained on, scaling reduces the angles. 'linear' reduces those of all pairs
alike (Chen et al., 2023), 'llama3' mostly those of pairs that turn slowly
within the original length (Dubey et al., 2024).
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
  """Returns cos and sin of the rotary angles, [B, L, 1, H/2] each."""
  per_token = frequencies(config)[None, None, None]
  angles = positions_BL[:, :, None, None] * per_token
  return jnp.cos(angles), jnp.sin(angles)


def frequencies(config: model_config.ModelConfig) -> Array:
  """Returns the angle per token of each pair in radians, [H/2] float32."""
  half = config.head_dim // 2
  exponents = jnp.arange(half, dtype=jnp.float32) / half
  plain = config.rope_theta**-exponents
  scaling = config.rope_scaling
  return _SCALED[scaling.rope_type](plain, scaling) if scaling else plain


def _linear(plain: Array, scaling: model_config.RopeScaling) -> Array:
  """Returns all frequencies divided by the factor."""
  return plain / scaling.factor


def _llama3(plain: Array, scaling: model_config.RopeScaling) -> Array:
  """Returns slow frequencies divided by the factor, and fast ones as they are.

  A pair is slow if it turns at most low_freq_factor times within the original
  length, and fast if it turns at least high_freq_factor times. Frequencies in
  between are interpolated.
  """
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  turns = plain * scaling.original_max_position_embeddings / (2 * math.pi)
  kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
  return plain * (kept + (1.0 - kept) / scaling.factor)


_SCALED: Mapping[str, Callable[..., Array]] = {
  'linear': _linear,
  'llama3': _llama3,
}


def rotate(x_BLNH: Array, cos_and_sin: tuple[Array, Array]) -> Array:
  """Returns the halves (a, b) of heads as (a cos - b sin, b cos + a sin)."""
  cos, sin = (x.astype(x_BLNH.dtype) for x in cos_and_sin)
  a, b = jnp.split(x_BLNH, 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
