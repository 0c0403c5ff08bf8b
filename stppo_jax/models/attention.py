"""Attention: each query looks at the keys it may see.

B rows, L queries, S keys, Q query heads, K key/value heads, G = Q / K, H head
size.
"""

from collections.abc import Sequence
import functools

import jax
import jax.numpy as jnp

Array = jax.Array

_MASKED = -1e30  # finite: a row of nothing but masked scores stays finite


def attention(
  q_BLQH: Array, k_BKSH: Array, v_BKSH: Array, visible_BLS: Array
) -> Array:
  """softmax(q k / √H) v in float32 scores; keys are shared, never repeated."""
  return over_parts(q_BLQH, [(k_BKSH, v_BKSH, visible_BLS)])


def over_parts(
  q_BLQH: Array, parts: Sequence[tuple[Array, Array, Array]]
) -> Array:
  """Attention to keys that lie apart, as if they followed one another.

  Parts are looked at one by one and added up in order, so that one of which
  nothing is visible adds an exact zero.

  Args:
    q_BLQH: queries.
    parts: keys [B, K, S, H], values and what is visible [B or 1, L or 1, S], S
      of each part its own.
  """
  B, L, Q, H = q_BLQH.shape
  K = parts[0][0].shape[1]
  q_BLKGH = q_BLQH.reshape(B, L, K, Q // K, H) * H**-0.5
  scores = []
  for k_BKSH, _, visible_BLS in parts:
    part = jnp.einsum(
      'blkgh,bksh->bkgls',
      q_BLKGH,
      k_BKSH,
      preferred_element_type=jnp.float32,
    )
    scores.append(jnp.where(visible_BLS[:, None, None], part, _MASKED))
  largest = functools.reduce(
    jnp.maximum, [jnp.max(x, axis=-1, keepdims=True) for x in scores]
  )
  largest = jax.lax.stop_gradient(largest)
  mixed = total = 0.0
  # Normalised after the product with v: H divisions a query, not S.
  for part, (_, v_BKSH, _) in zip(scores, parts):
    weights = jnp.exp(part - largest)
    total += jnp.sum(weights, axis=-1, keepdims=True)
    mixed += jnp.einsum(
      'bkgls,bksh->bkglh', weights.astype(v_BKSH.dtype), v_BKSH
    )
  mixed = mixed / total.astype(mixed.dtype)
  return mixed.transpose(0, 3, 1, 2, 4).reshape(B, L, Q, H)
