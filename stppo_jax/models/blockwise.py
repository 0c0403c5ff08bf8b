"""Computes causal attention in tiles: memory grows linearly with the length.

B rows, L tokens (with padding to whole tiles), N query heads, K heads of keys
and of values, R = N / K, H head size; J keys; tiles of C tokens.

A tile of queries goes through one tile of keys after the other, up to its own.
The weights of the keys so far are relative to the largest logit so far,

    o = Σ_j exp(x_j - m) v_j,   t = Σ_j exp(x_j - m),   m = max_j x_j

and o and t are scaled by exp(m - m') when the largest logit rises to m'. This
is FlashAttention (Dao et al., 2022, https://arxiv.org/abs/2205.14135).

Automatic differentiation would keep the weights of every pair of tiles between
the passes: [L, L] again. So the backward pass is written by hand. It keeps the
inputs, the result and one number per query, log Σ_j exp(x_j) = m + log t, from
which the weights of a pair are computed again as exp(x - log Σ), already
normalised. With g the gradient of the result and w the weights,

    dL/dv_j = Σ_l w_lj g_l
    dL/dx_lj = w_lj (g_l . v_j - g_l . o_l)

where g_l . o_l = Σ_j w_lj g_l . v_j is computed without other tiles. Pairs are
visited in the order of the forward pass, so a sum is the same in every run.

For at most `_FEW` tiles there is a second, unrolled program: each tile of
queries takes all its keys in one product, and no sums are carried from pair to
pair, which is faster while the logits of a tile of queries, [C, L], are few.

With a window, both programs leave out keys that no query of a tile sees.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.parallel import activations

Array = jax.Array

_MASKED = -1e30  # finite: the difference of two is 0, not nan
_TOKENS = -2  # the axis that is cut into tiles
_FEW = 4  # the most tiles for which the loop is unrolled


def attend(
  size: int,
  tile: int,
  mesh: jax.sharding.Mesh | None,
  segment_ids_BL: Array | None = None,
  window: int = 0,
) -> Callable[[Array, Array, Array], Array]:
  """Returns `attend` of `attention.causal_attention`, computed in tiles.

  Args:
    size: tokens of a row with its padding.
    tile: the most tokens of a tile.
    mesh: mesh that activations are laid out on; None: one device.
    segment_ids_BL: int32, the sequence that a token belongs to, of several in a
      row; 0 at padding. None: every row is one sequence.
    window: the number of tokens that a query sees at most; 0: all.
  """
  num_tiles = -(-size // tile)
  tile = -(-size // num_tiles)  # equal tiles have the least padding
  padded = num_tiles * tile
  mix: Any = _mix_in_loop  # custom_vjp hides the type of its result
  if num_tiles <= _FEW:
    padded, mix = size, _mix_unrolled  # the last tile may be shorter
  ids_BL = segment_ids_BL
  if ids_BL is not None:
    ids_BL = jnp.pad(ids_BL, ((0, 0), (0, padded - size)))

  def attend_rows(q_BLNH, k_BLKH, v_BLKH):
    B, L, N, H = q_BLNH.shape
    k, v = (activations.spread_heads(x, N, mesh) for x in (k_BLKH, v_BLKH))
    K = k.shape[2]
    widths = ((0, 0), (0, padded - L), (0, 0), (0, 0))
    q, k, v = (
      activations.constrain(
        jnp.pad(x, widths), mesh, activations.ROWS, None, activations.TENSOR
      )
      for x in (q_BLNH * H**-0.5, k, v)
    )
    q_BKRLH = q.reshape(B, padded, K, N // K, H).transpose(0, 2, 3, 1, 4)
    # The causal mask hides padded keys from all queries but padded ones, and
    # the results of those are cut off again.
    k_BKLH, v_BKLH = k.swapaxes(1, 2), v.swapaxes(1, 2)
    mixed = mix(q_BKRLH, k_BKLH, v_BKLH, ids_BL, tile, window)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(B, padded, N, H)[:, :L]

  return attend_rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _mix_in_loop(
  q_BKRLH: Array,
  k_BKLH: Array,
  v_BKLH: Array,
  ids_BL: Array | None,
  tile: int,
  window: int,
) -> Array:
  """Returns causal softmax(q k) v by a loop over pairs of tiles."""
  return _forward(q_BKRLH, k_BKLH, v_BKLH, ids_BL, tile, window)[0]


def _forward(q_BKRLH, k_BKLH, v_BKLH, ids_BL, tile, window):
  def add_pair(carry, pair):
    queries, keys = pair
    mixed, total, largest = (_cut(x, queries, tile) for x in carry)
    logits = _pair_logits(q_BKRLH, k_BKLH, ids_BL, pair, tile, window)
    # Sums over earlier keys are relative to the old largest logit, so they are
    # rescaled to the new one before terms are added to them.
    raised = jnp.maximum(largest, jnp.max(logits, axis=-1, keepdims=True))
    weights, rescale = jnp.exp(logits - raised), jnp.exp(largest - raised)
    v = _cut(v_BKLH, keys, tile)
    mixed = mixed * rescale + _sum('bkrlj,bkjh->bkrlh', weights, v)
    total = total * rescale + jnp.sum(weights, axis=-1, keepdims=True)
    updated = (mixed, total, raised)
    return tuple(
      _put(x, y, queries, tile) for x, y in zip(carry, updated, strict=True)
    ), None

  zeros = jnp.zeros(q_BKRLH.shape, jnp.float32)
  start = (zeros, zeros[..., :1], zeros[..., :1] + _MASKED)
  (mixed, total, largest), _ = jax.lax.scan(
    add_pair, start, _pairs(q_BKRLH, tile, window)
  )
  mixed = (mixed / total).astype(v_BKLH.dtype)
  log_total = largest + jnp.log(total)
  return mixed, (q_BKRLH, k_BKLH, v_BKLH, ids_BL, mixed, log_total)


def _backward(tile, window, residuals, gradient_BKRLH):
  q_BKRLH, k_BKLH, v_BKLH, ids_BL, mixed, log_total = residuals
  mean = _mean(gradient_BKRLH, mixed)

  # One pass makes all three gradients, because the weights of a pair, which are
  # the costly part, serve all of them. A tile of queries or keys is in many
  # pairs, so each gradient is added to what is there.
  def add_pair(carry, pair):
    queries, keys = pair
    q, gradient, log_sum, centre = (
      _cut(x, queries, tile) for x in (q_BKRLH, gradient_BKRLH, log_total, mean)
    )
    k, v = (_cut(x, keys, tile) for x in (k_BKLH, v_BKLH))
    # Already normalised: log_sum includes the keys of all tiles.
    logits = _pair_logits(q_BKRLH, k_BKLH, ids_BL, pair, tile, window)
    weights = jnp.exp(logits - log_sum)
    d_weights = _sum('bkrlh,bkjh->bkrlj', gradient, v)
    d_logits = weights * (d_weights - centre)
    terms = (
      (queries, _sum('bkrlj,bkjh->bkrlh', d_logits, k)),
      (keys, _sum_over_queries(d_logits, q)),
      (keys, _sum_over_queries(weights, gradient)),
    )
    return tuple(
      _put(x, _cut(x, number, tile, axis) + y, number, tile, axis)
      for x, (number, y), axis in zip(carry, terms, axes, strict=True)
    ), None

  # Gradients of keys and values are summed as [B, K, H, L], the layout of
  # `_sum_over_queries`.
  inputs = (q_BKRLH, k_BKLH.swapaxes(2, 3), v_BKLH.swapaxes(2, 3))
  axes = (_TOKENS, -1, -1)
  start = tuple(jnp.zeros(x.shape, jnp.float32) for x in inputs)
  sums, _ = jax.lax.scan(add_pair, start, _pairs(q_BKRLH, tile, window))
  d_q, d_k, d_v = _cast_like(sums, inputs)
  return d_q, d_k.swapaxes(2, 3), d_v.swapaxes(2, 3), None


_mix_in_loop.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _mix_unrolled(
  q_BKRLH: Array,
  k_BKLH: Array,
  v_BKLH: Array,
  ids_BL: Array | None,
  tile: int,
  window: int,
) -> Array:
  """Returns causal softmax(q k) v by an unrolled loop over tiles of queries.

  The last tile may be shorter.
  """
  return _forward_unrolled(q_BKRLH, k_BKLH, v_BKLH, ids_BL, tile, window)[0]


def _forward_unrolled(q_BKRLH, k_BKLH, v_BKLH, ids_BL, tile, window):
  mixed, log_total = [], []
  for start, begin, end in _bounds(q_BKRLH, tile, window):
    # No later keys: the causal mask hides them, and they would cost products.
    k, v = k_BKLH[:, :, start:end], v_BKLH[:, :, start:end]
    ids = _some_ids(ids_BL, slice(begin, end), slice(start, end))
    q = q_BKRLH[..., begin:end, :]
    logits = _logits(q, k, ids, begin - start, window)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mean = _sum('bkrlj,bkjh->bkrlh', weights, v) / total
    mixed.append(mean.astype(v.dtype))
    log_total.append(largest + jnp.log(total))
  mixed, log_total = (
    jnp.concatenate(x, axis=_TOKENS) for x in (mixed, log_total)
  )
  return mixed, (q_BKRLH, k_BKLH, v_BKLH, ids_BL, mixed, log_total)


def _backward_unrolled(tile, window, residuals, gradient_BKRLH):
  q_BKRLH, k_BKLH, v_BKLH, ids_BL, mixed, log_total = residuals
  mean = _mean(gradient_BKRLH, mixed)
  d_q: list[Array] = []
  d_k: Any = 0.0
  d_v: Any = 0.0
  for start, begin, end in _bounds(q_BKRLH, tile, window):
    q, gradient, log_sum, centre = (
      x[..., begin:end, :] for x in (q_BKRLH, gradient_BKRLH, log_total, mean)
    )
    k, v = k_BKLH[:, :, start:end], v_BKLH[:, :, start:end]
    ids = _some_ids(ids_BL, slice(begin, end), slice(start, end))
    weights = jnp.exp(_logits(q, k, ids, begin - start, window) - log_sum)
    d_weights = _sum('bkrlh,bkjh->bkrlj', gradient, v)
    d_logits = weights * (d_weights - centre)
    d_q.append(_sum('bkrlj,bkjh->bkrlh', d_logits, k))
    # Other keys are hidden from this tile of queries: their gradient is 0.
    hidden = ((0, 0), (0, 0), (0, 0), (start, q_BKRLH.shape[_TOKENS] - end))
    d_k += jnp.pad(_sum_over_queries(d_logits, q), hidden)
    d_v += jnp.pad(_sum_over_queries(weights, gradient), hidden)
  d_queries = jnp.concatenate(d_q, axis=_TOKENS)
  sums = (d_queries, d_k.swapaxes(2, 3), d_v.swapaxes(2, 3))
  return *_cast_like(sums, residuals), None


_mix_unrolled.defvjp(_forward_unrolled, _backward_unrolled)


def _bounds(
  q_BKRLH: Array, tile: int, window: int
) -> list[tuple[int, int, int]]:
  """Returns of each tile its first key, its first query and its end."""
  L = q_BKRLH.shape[_TOKENS]
  return [
    (max(begin + 1 - window, 0) if window else 0, begin, min(begin + tile, L))
    for begin in range(0, L, tile)
  ]


def _mean(gradient: Array, mixed: Array) -> Array:
  """Returns g . o of each query [B, K, R, L, 1].

  It is the weighted mean of the weights' gradients, which the derivative of
  softmax subtracts from each of them.
  """
  return _sum('bkrlh,bkrlh->bkrl', gradient, mixed)[..., None]


def _sum_over_queries(pairs_BKRLJ: Array, q_BKRLH: Array) -> Array:
  """Returns Σ over queries and their heads of pairs x q, [B, K, H, J].

  With H before J, only q has to be transposed, which is the smaller operand.
  """
  pairs_BKRLJ = pairs_BKRLJ.astype(q_BKRLH.dtype)
  # einsum sums over its letters in alphabetical order, and the order decides
  # how sums round. With g for R, query heads come before tokens, as in memory.
  return _sum('bkglh,bkglj->bkhj', q_BKRLH, pairs_BKRLJ)


def _cast_like(gradients: Sequence[Array], inputs: Sequence[Array]) -> tuple:
  """Returns the gradients in the dtypes of the inputs."""
  return tuple(x.astype(y.dtype) for x, y in zip(gradients, inputs))


def _pairs(q_BKRLH: Array, tile: int, window: int) -> tuple[Array, Array]:
  """Returns for each pair the number of its tile of queries, and of keys.

  A tile of queries is paired with the tiles of keys up to its own, from the
  first one that its first query sees.
  """
  pairs = np.tril_indices(q_BKRLH.shape[_TOKENS] // tile)
  queries, keys = (x.astype(np.int32) for x in pairs)
  if window:
    seen = queries * tile + 1 - window < (keys + 1) * tile
    queries, keys = queries[seen], keys[seen]
  # The barrier makes the numbers seem to depend on the queries. If they were
  # constants, the compiler would compute the masks of all pairs ahead of a loop
  # that computes layers again, and hold them in memory.
  return jax.lax.optimization_barrier((queries, keys, q_BKRLH))[:2]


def _pair_logits(
  q_BKRLH: Array,
  k_BKLH: Array,
  ids_BL: Array | None,
  pair: tuple[Array, Array],
  tile: int,
  window: int,
) -> Array:
  """Returns the logits of a pair of tiles [B, K, R, C, C], float32."""
  queries, keys = pair
  q, k = _cut(q_BKRLH, queries, tile), _cut(k_BKLH, keys, tile)
  ids = None
  if ids_BL is not None:
    ids = _cut(ids_BL, queries, tile, 1), _cut(ids_BL, keys, tile, 1)
  return _logits(q, k, ids, (queries - keys) * tile, window)


def _some_ids(ids_BL: Array | None, queries: slice, keys: slice):
  """Returns the segments of some queries and keys, as `_logits` takes them."""
  return None if ids_BL is None else (ids_BL[:, queries], ids_BL[:, keys])


def _logits(
  q_BKRLH: Array,
  k_BKJH: Array,
  ids: tuple[Array, Array] | None,
  offset: Array | int,
  window: int,
) -> Array:
  """Returns float32 logits [B, K, R, L, J].

  Query l sees the keys up to l + offset, the last `window` of them if it is not
  0, and of its own segment if segments are given; the logits of others are
  _MASKED.
  """
  logits = _sum('bkrlh,bkjh->bkrlj', q_BKRLH, k_BKJH)
  queries_L, keys_J = (
    np.arange(x.shape[_TOKENS], dtype=np.int32) for x in (q_BKRLH, k_BKJH)
  )
  ahead_LJ = keys_J[None] - queries_L[:, None]
  visible_BLJ = (ahead_LJ <= offset)[None]
  if window:
    visible_BLJ &= (ahead_LJ > offset - window)[None]
  if ids is not None:
    visible_BLJ &= ids[0][:, :, None] == ids[1][:, None]
  return jnp.where(visible_BLJ[:, None, None], logits, _MASKED)


def _sum(equation: str, x: Array, y: Array) -> Array:
  """Returns an einsum of products in y's dtype, summed in float32."""
  return jnp.einsum(
    equation, x.astype(y.dtype), y, preferred_element_type=jnp.float32
  )


def _cut(x: Array, number: Array, tile: int, axis: int = _TOKENS) -> Array:
  """Returns the numbered tile of x along an axis."""
  return jax.lax.dynamic_slice_in_dim(x, number * tile, tile, axis=axis)


def _put(
  x: Array, y: Array, number: Array, tile: int, axis: int = _TOKENS
) -> Array:
  """Returns x with y in the place of the numbered tile."""
  return jax.lax.dynamic_update_slice_in_dim(x, y, number * tile, axis=axis)
