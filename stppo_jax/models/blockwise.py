"""Causal attention in blocks: memory grows with the length, not its square.

B rows, L tokens, P padded tokens, Q query heads, K key/value heads, G = Q / K,
H head size; blocks of C tokens.

Queries of a block look at one block of keys after the other, and at none that
follows. Weights of keys seen so far are relative to the largest score so far,

    o = Σ_s exp(x_s - m) v_s,   t = Σ_s exp(x_s - m),   m = max_s x_s

and shrink by exp(m - m') when it rises to m'. The backward pass computes the
weights of each pair of blocks again from log Σ exp(x) = m + log t, as in
FlashAttention (Dao et al., 2022, https://arxiv.org/abs/2205.14135).

Of a few blocks, each looks at all keys it may see at once: no sums are carried
from pair to pair.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.parallel import activations

Array = jax.Array

_MASKED = -1e30  # finite: differences of it are no nan
_TOKENS = -2  # the axis of what is cut into blocks
_FEW = 4


def attend(
  size: int, block: int, mesh: jax.sharding.Mesh | None
) -> Callable[[Array, Array, Array], Array]:
  """See `attention.whole`; rows of `size` tokens, blocks of at most `block`."""
  num_blocks = -(-size // block)
  block = -(-size // num_blocks)  # all alike, with the least padding
  padded = num_blocks * block
  mixed_of = _mixed
  if num_blocks <= _FEW:
    padded, mixed_of = size, _mixed_of_few  # the last block may be shorter

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
    mixed = mixed_of(q_BKGPH, k.swapaxes(1, 2), v.swapaxes(1, 2), block)
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
  mean = _mean(gradient_BKGPH, mixed)

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
      (of, _by_key(of_scores, q)),
      (of, _by_key(weights, gradient)),
    )
    return tuple(
      _put(x, _cut(x, where, block, axis) + y, where, block, axis)
      for x, (where, y), axis in zip(carry, found, axes, strict=True)
    ), None

  inputs = (q_BKGPH, k_BKPH.swapaxes(2, 3), v_BKPH.swapaxes(2, 3))
  axes = (_TOKENS, -1, -1)
  start = tuple(jnp.zeros(x.shape, jnp.float32) for x in inputs)
  sums, _ = jax.lax.scan(look, start, _pairs(q_BKGPH, block))
  of_q, of_k, of_v = _like(sums, inputs)
  return of_q, of_k.swapaxes(2, 3), of_v.swapaxes(2, 3)


_mixed.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _mixed_of_few(
  q_BKGLH: Array, k_BKLH: Array, v_BKLH: Array, block: int
) -> Array:
  """As `_mixed`; the last block may be shorter than the others."""
  return _forward_of_few(q_BKGLH, k_BKLH, v_BKLH, block)[0]


def _forward_of_few(q_BKGLH, k_BKLH, v_BKLH, block):
  mixed, log_total = [], []
  for begin, end in _bounds(q_BKGLH, block):
    k, v = k_BKLH[:, :, :end], v_BKLH[:, :, :end]
    scores = _scores_of(q_BKGLH[..., begin:end, :], k, begin)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    found = _sum('bkgls,bksh->bkglh', weights, v) / total
    mixed.append(found.astype(v.dtype))
    log_total.append(largest + jnp.log(total))
  mixed, log_total = (
    jnp.concatenate(x, axis=_TOKENS) for x in (mixed, log_total)
  )
  return mixed, (q_BKGLH, k_BKLH, v_BKLH, mixed, log_total)


def _backward_of_few(block, kept, gradient_BKGLH):
  q_BKGLH, k_BKLH, v_BKLH, mixed, log_total = kept
  mean = _mean(gradient_BKGLH, mixed)
  of_q, of_k, of_v = [], 0.0, 0.0
  for begin, end in _bounds(q_BKGLH, block):
    q, gradient, log_sum, centre = (
      x[..., begin:end, :] for x in (q_BKGLH, gradient_BKGLH, log_total, mean)
    )
    k, v = k_BKLH[:, :, :end], v_BKLH[:, :, :end]
    weights = jnp.exp(_scores_of(q, k, begin) - log_sum)
    of_weights = _sum('bkglh,bksh->bkgls', gradient, v)
    of_scores = weights * (of_weights - centre)
    of_q.append(_sum('bkgls,bksh->bkglh', of_scores, k))
    later = ((0, 0), (0, 0), (0, 0), (0, q_BKGLH.shape[_TOKENS] - end))
    of_k += jnp.pad(_by_key(of_scores, q), later)
    of_v += jnp.pad(_by_key(weights, gradient), later)
  of_q = jnp.concatenate(of_q, axis=_TOKENS)
  return _like((of_q, of_k.swapaxes(2, 3), of_v.swapaxes(2, 3)), kept)


_mixed_of_few.defvjp(_forward_of_few, _backward_of_few)


def _bounds(q_BKGLH: Array, block: int) -> list[tuple[int, int]]:
  """Begin and end of each block."""
  L = q_BKGLH.shape[_TOKENS]
  return [(begin, min(begin + block, L)) for begin in range(0, L, block)]


def _mean(gradient: Array, mixed: Array) -> Array:
  """What a softmax subtracts of each gradient: their weighted mean.

  The gradient of a score is weight x (gradient of the weight - this).
  """
  return _sum('bkglh,bkglh->bkgl', gradient, mixed)[..., None]


def _by_key(of_pairs_BKGLS: Array, by_query_BKGLH: Array) -> Array:
  """Σ over the queries, [B, K, H, S]: so the small one of the two is turned."""
  of_pairs_BKGLS = of_pairs_BKGLS.astype(by_query_BKGLH.dtype)
  return _sum('bkglh,bkgls->bkhs', by_query_BKGLH, of_pairs_BKGLS)


def _like(gradients: Sequence[Array], inputs: Sequence[Array]) -> tuple:
  return tuple(x.astype(y.dtype) for x, y in zip(gradients, inputs))


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
  q, k = _cut(q_BKGPH, at, block), _cut(k_BKPH, of, block)
  return _scores_of(q, k, (at - of) * block)


def _scores_of(q_BKGLH: Array, k_BKSH: Array, offset: Array | int) -> Array:
  """[B, K, G, L, S], float32; query l sees the keys up to l + offset."""
  scores = _sum('bkglh,bksh->bkgls', q_BKGLH, k_BKSH)
  queries_L, keys_S = (
    np.arange(x.shape[_TOKENS], dtype=np.int32) for x in (q_BKGLH, k_BKSH)
  )
  visible_LS = keys_S[None] - queries_L[:, None] <= offset
  return jnp.where(visible_LS[None, None, None], scores, _MASKED)


def _sum(equation: str, x: Array, y: Array) -> Array:
  """Products in the dtype of y, summed in float32."""
  return jnp.einsum(
    equation, x.astype(y.dtype), y, preferred_element_type=jnp.float32
  )


def _cut(x: Array, at: Array, block: int, axis: int = _TOKENS) -> Array:
  return jax.lax.dynamic_slice_in_dim(x, at * block, block, axis=axis)


def _put(
  x: Array, y: Array, at: Array, block: int, axis: int = _TOKENS
) -> Array:
  return jax.lax.dynamic_update_slice_in_dim(x, y, at * block, axis=axis)
