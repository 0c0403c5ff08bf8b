"""Rotates queries and keys by positions (Su et al., 2021, arXiv 2104.09864).

Shape letters: B rows, L tokens of a row, N heads of queries or of keys, H size
of the rotated part of a head. Only the first H numbers of a head are rotated.
The numbers at the indices i and i + H/2 of a head are a pair. A pair turns by
the angle

    position * theta^(-2i / H)

Scaling reduces the angles, so that texts may be longer than the texts that a
model was first trained on. 'linear' divides the angles of all pairs by the same
number (Chen et al., 2023). 'llama3' (Dubey et al., 2024) and 'yarn' (Peng et
al., 2023) reduce the angles of pairs that make few turns within the original
length, and leave pairs with many turns unchanged. 'longrope' (Ding et al.,
2024) divides the angle of each pair by a number of its own. 'dynamic' takes a
larger theta. 'yarn' and 'longrope' also multiply the rotated numbers of queries
and keys by a factor.
"""

from collections.abc import Callable, Mapping
import math

import jax
import jax.numpy as jnp

from stppo_jax.models import config as model_config

Array = jax.Array


def rotation(
  config: model_config.ModelConfig, positions_BL: Array, *, local: bool = False
) -> tuple[Array, Array]:
  """Returns cos and sin of the rotary angles, [B, L, 1, H/2] each.

  Args:
    config: the model's config.
    positions_BL: positions of the tokens.
    local: whether the angles are for layers with a window.
  """
  per_token = frequencies(config, local=local)[None, None, None]
  angles = positions_BL[:, :, None, None] * per_token
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  scaling = config.rope_scaling
  own = local and config.local_rope_theta
  if own or scaling is None or scaling.attention_factor == 1.0:
    return cos, sin
  return scaling.attention_factor * cos, scaling.attention_factor * sin


def frequencies(
  config: model_config.ModelConfig, *, local: bool = False
) -> Array:
  """Returns the angle of each pair per position in radians, float32 [H/2]."""
  half = int(config.head_dim * config.partial_rotary_factor) // 2
  exponents = jnp.arange(half, dtype=jnp.float32) / half
  if local and config.local_rope_theta:
    return config.local_rope_theta**-exponents
  plain, scaling = config.rope_theta**-exponents, config.rope_scaling
  if scaling is None:
    return plain
  return _SCALED[scaling.rope_type](plain, scaling, config.rope_theta)


def _linear(
  plain: Array, scaling: model_config.RopeScaling, theta: float
) -> Array:
  """Returns all frequencies divided by the factor."""
  del theta
  return plain / scaling.factor


def _dynamic(
  plain: Array, scaling: model_config.RopeScaling, theta: float
) -> Array:
  """Returns the frequencies of a theta that suits the longest text of the run.

  If this text exceeds the original length, theta grows with the length of the
  text. Otherwise theta does not change.
  """
  half, original = len(plain), scaling.original_max_position_embeddings
  excess = max(scaling.length, original) / original - 1
  theta *= (1 + scaling.factor * excess) ** (half / (half - 1))
  return theta ** -(jnp.arange(half, dtype=jnp.float32) / half)


def _longrope(
  plain: Array, scaling: model_config.RopeScaling, theta: float
) -> Array:
  """Returns each pair's frequency divided by the pair's own number."""
  del theta
  is_long = scaling.length > scaling.original_max_position_embeddings
  return plain / jnp.array(
    scaling.long_factor if is_long else scaling.short_factor
  )


def _yarn(
  plain: Array, scaling: model_config.RopeScaling, theta: float
) -> Array:
  """Returns the frequencies, reduced for slow pairs and not for fast pairs.

  The frequencies of slow pairs are divided by the factor, and the frequencies
  of fast pairs stay unchanged. Between the last fast pair and the first slow
  pair, a frequency is a weighted mean of the unchanged and the divided
  frequency. The weight of the unchanged frequency falls linearly with the index
  of the pair.
  """
  half, original = len(plain), scaling.original_max_position_embeddings

  def pair_of(turns):  # the index, a real number, of the pair with these turns
    return half * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

  first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
  if scaling.truncate:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, 2 * half - 1)
  width = last - first or 0.001
  kept = 1.0 - jnp.clip((jnp.arange(half) - first) / width, 0.0, 1.0)
  return plain * (kept + (1.0 - kept) / scaling.factor)


def _llama3(
  plain: Array, scaling: model_config.RopeScaling, theta: float
) -> Array:
  """Returns the frequencies, reduced for slow pairs and not for fast pairs.

  A pair is slow if it turns at most low_freq_factor times within the original
  length. Its frequency is divided by the factor. A pair is fast if it turns at
  least high_freq_factor times. Its frequency stays unchanged. The frequency of
  every other pair is a weighted mean of the divided and the unchanged
  frequency.
  """
  del theta
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  turns = plain * scaling.original_max_position_embeddings / (2 * math.pi)
  kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
  return plain * (kept + (1.0 - kept) / scaling.factor)


_SCALED: Mapping[str, Callable[..., Array]] = {
  'linear': _linear,
  'dynamic': _dynamic,
  'llama3': _llama3,
  'yarn': _yarn,
  'longrope': _longrope,
}


def rotate(x_BLNH: Array, cos_and_sin: tuple[Array, Array]) -> Array:
  """Returns rotated queries or keys.

  The first H numbers of each head are rotated. If a is the first half of these
  numbers and b is the second half, the halves become a cos - b sin and
  b cos + a sin. The other numbers of the head do not change.
  """
  cos, sin = (x.astype(x_BLNH.dtype) for x in cos_and_sin)
  width = 2 * cos.shape[-1]
  if width < x_BLNH.shape[-1]:
    turned = rotate(x_BLNH[..., :width], cos_and_sin)
    return jnp.concatenate([turned, x_BLNH[..., width:]], axis=-1)
  a, b = jnp.split(x_BLNH, 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
