"""Causal attention in blocks: memory grows with the length, not its square.

B rows, L tokens, P padded tokens, Q query heads, K key/value heads, G = Q / K,
H head size; blocks of C tokens.

Queries of a block look at one block of keys after the other, and at none that
follows. Weights of keys seen so far are relative to the largest score so far,

    o = Σ_s exp(x_s - m) v_s,   t = Σ_s exp(x_s - m),   m = max_s x_s

and shrink by exp(m - m') when it rises to m'. The backward pass computes the
weights of each pair of blocks again from log Σ exp(x) = m + log t, as in
FlashAttention (Dao et al., 2022, https://arxiv.org/abs/2205.14135).
"""

from collections.abc import Callable
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.parallel import activations

Array = jax.Array

_MASKED = -1e30  # finite: differences of it are no nan
_TOKENS = -2  # the axis of what is cut into blocks


def attend(
  size: int, block: int, mesh: jax.sharding.Mesh | None
) -> Callable[[Array, Array, Array], Array]:
  """See `attention.whole`; rows of `size` tokens, blocks of at most `block`."""
  num_blocks = -(-size // block)
  block = -(-size // num_blocks)  # all alike, with the least padding
  padded = num_blocks * block

  def whole(q_BLQH, k_BLKH, v_BLKH):
    B, L, Q, H = q_BLQH.shape
    copies = _copies(Q, k_BLKH.shape[2], mesh)
    K = k_BLKH.shape[2] * copies
    k, v = (jnp.repeat(x, copies, axis=2) for x in (k_BLKH, v_BLKH))
    widths = ((0, 0), (0, padded - L), (0, 0), (0, 0))
    q, k, v = (
      activations.constrain(
        jnp.pad(x, widths), mesh, activations.ROWS, None, activations.TENSOR
      )
      for x in (q_BLQH * H**-0.5, k, v)
    )
    q_BKGPH = q.reshape(B, padded, K, Q // K, H).transpose(0, 2, 3, 1, 4)
    # What is added after the last token is seen by what is cut off again.
    mixed = _mixed(q_BKGPH, k.swapaxes(1, 2), v.swapaxes(1, 2), block)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(B, padded, Q, H)[:, :L]

  return whole


def _copies(Q: int, K: int, mesh: jax.sharding.Mesh | None) -> int:
  """Of each key/value head, so that every device has those it needs.

  1 but where devices share heads: their gradients are summed once then, not in
  every pair of blocks.
  """
  if mesh is None:
    return 1
  heads = math.lcm(K, activations.extent(mesh, activations.TENSOR))
  return heads // K if Q % heads == 0 else 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _mixed(q_BKGPH: Array, k_BKPH: Array, v_BKPH: Array, block: int) -> Array:
  """softmax(q k) v, causal; in the dtype of v."""
  return _forward(q_BKGPH, k_BKPH, v_BKPH, block)[0]


def _forward(q_BKGPH, k_BKPH, v_BKPH, block):
  def look(carry, pair):
    at, _ = pair
    mixed, total, largest = (_cut(x, at, block) for x in carry)
    scores = _scores(q_BKGPH, k_BKPH, pair, block)
    risen = jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True))
    weights, shrunk = jnp.exp(scores - risen), jnp.exp(largest - risen)
    v = _cut(v_BKPH, pair[1], block)
    mixed = mixed * shrunk + _sum('bkgls,bksh->bkglh', weights, v)
    total = total * shrunk + jnp.sum(weights, axis=-1, keepdims=True)
    found = (mixed, total, risen)
    return tuple(_put(x, y, at, block) for x, y in zip(carry, found)), None

  nothing = jnp.zeros(q_BKGPH.shape, jnp.float32)
  start = (nothing, nothing[..., :1], nothing[..., :1] + _MASKED)
  (mixed, total, largest), _ = jax.lax.scan(look, start, _pairs(q_BKGPH, block))
  mixed = (mixed / total).astype(v_BKPH.dtype)
  log_total = largest + jnp.log(total)
  return mixed, (q_BKGPH, k_BKPH, v_BKPH, mixed, log_total)


def _backward(block, kept, gradient_BKGPH):
  q_BKGPH, k_BKPH, v_BKPH, mixed, log_total = kept
  # Of a softmax: weight x (gradient of the weight - its weighted mean).
  mean = _sum('bkgph,bkgph->bkgp', gradient_BKGPH, mixed)[..., None]

  def look(carry, pair):
    at, of = pair
    q, gradient, log_sum, centre = (
      _cut(x, at, block) for x in (q_BKGPH, gradient_BKGPH, log_total, mean)
    )
    k, v = (_cut(x, of, block) for x in (k_BKPH, v_BKPH))
    weights = jnp.exp(_scores(q_BKGPH, k_BKPH, pair, block) - log_sum)
    of_weights = _sum('bkglh,bksh->bkgls', gradient, v)
    of_scores = weights * (of_weights - centre)
    found = (
      (at, _sum('bkgls,bksh->bkglh', of_scores, k)),
      (of, _sum('bkgls,bkglh->bksh', of_scores, q)),
      (of, _sum('bkgls,bkglh->bksh', weights, gradient)),
    )
    return tuple(
      _put(x, _cut(x, where, block) + y, where, block)
      for x, (where, y) in zip(carry, found)
    ), None

  inputs = (q_BKGPH, k_BKPH, v_BKPH)
  start = tuple(jnp.zeros(x.shape, jnp.float32) for x in inputs)
  sums, _ = jax.lax.scan(look, start, _pairs(q_BKGPH, block))
  return tuple(x.astype(y.dtype) for x, y in zip(sums, inputs))


_mixed.defvjp(_forward, _backward)


def _pairs(q_BKGPH: Array, block: int) -> tuple[Array, Array]:
  """Blocks of queries, and each with those of keys up to its own."""
  pairs = np.tril_indices(q_BKGPH.shape[_TOKENS] // block)
  at, of = (x.astype(np.int32) for x in pairs)
  # As if they came of the queries. As constants they would let a model that
  # computes layers again work out the masks of all pairs before, and hold them.
  return jax.lax.optimization_barrier((at, of, q_BKGPH))[:2]


def _scores(q_BKGPH: Array, k_BKPH: Array, pair, block: int) -> Array:
  """[B, K, G, C, C] of a pair of blocks, float32."""
  at, of = pair
  scores = _sum(
    'bkglh,bksh->bkgls', _cut(q_BKGPH, at, block), _cut(k_BKPH, of, block)
  )
  within_C = np.arange(block, dtype=np.int32)
  ahead_CC = within_C[None] - within_C[:, None]
  visible_CC = ahead_CC <= (at - of) * block
  return jnp.where(visible_CC[None, None, None], scores, _MASKED)


def _sum(equation: str, x: Array, y: Array) -> Array:
  """Products in the dtype of y, summed in float32."""
  return jnp.einsum(
    equation, x.astype(y.dtype), y, preferred_element_type=jnp.float32
  )


def _cut(x: Array, at: Array, block: int) -> Array:
  return jax.lax.dynamic_slice_in_dim(x, at * block, block, axis=_TOKENS)


def _put(x: Array, y: Array, at: Array, block: int) -> Array:
  return jax.lax.dynamic_update_slice_in_dim(x, y, at * block, axis=_TOKENS)
