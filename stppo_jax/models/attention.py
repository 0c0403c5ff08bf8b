"""Attention: each query looks at the keys it may see.

B rows, L queries, S keys, Q query heads, K key/value heads, G = Q / K, H head
size.
"""

import jax
import jax.numpy as jnp

Array = jax.Array

_MASKED = -1e30  # finite: a row of nothing but masked scores stays finite


def attention(
  q_BLQH: Array, k_BKSH: Array, v_BKSH: Array, visible_BLS: Array
) -> Array:
  """softmax(q k / √H) v in float32 scores; keys are shared, never repeated."""
  B, L, Q, H = q_BLQH.shape
  K = k_BKSH.shape[1]
  q_BLKGH = q_BLQH.reshape(B, L, K, Q // K, H)
  scores = jnp.einsum(
    'blkgh,bksh->bkgls',
    q_BLKGH * H**-0.5,
    k_BKSH,
    preferred_element_type=jnp.float32,
  )
  scores = jnp.where(visible_BLS[:, None, None], scores, _MASKED)
  # Normalised after the product with v: H divisions a query, not S.
  largest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
  weights = jnp.exp(scores - largest)
  mixed = jnp.einsum('bkgls,bksh->bkglh', weights.astype(v_BKSH.dtype), v_BKSH)
  mixed = mixed / jnp.sum(weights, axis=-1, keepdims=True).astype(mixed.dtype)
  return mixed.transpose(0, 3, 1, 2, 4).reshape(B, L, Q, H)
