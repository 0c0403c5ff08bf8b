"""Computes causal attention in tiles: memory grows linearly with the length.

Shape letters: B rows, L tokens of a row with its padding, N query heads, K key
and value heads, R = N / K query heads of one key and value head, H size of a
head, J keys, C tokens of a tile.

Each tile of queries visits the tiles of keys one after another, up to the tile
at its own position. With x_j the logit of key j, the sums over the keys visited
so far are kept relative to the largest logit so far,

    o = Σ_j exp(x_j - m) v_j,   t = Σ_j exp(x_j - m),   m = max_j x_j

When the largest logit rises from m to m', o and t are scaled by exp(m - m').
The result is o / t after the last tile. This is FlashAttention (Dao et al.,
2022, https://arxiv.org/abs/2205.14135).

For the backward pass, automatic differentiation would save the weights of all
pairs of tiles, together [L, L] numbers. So the backward pass is written by
hand. The forward pass saves the inputs, the result, and for each query the
number log_total = log Σ_j exp(x_j) = m + log t. The backward pass computes the
weights of a pair of tiles again, already normalised, as exp(x - log_total).
With w the normalised weights, o the result, e the loss and g = de/do,

    de/dv_j = Σ_l w_lj g_l
    de/dx_lj = w_lj (g_l . v_j - g_l . o_l)

where g_l . o_l = Σ_j w_lj g_l . v_j needs no sum over the tiles of keys. The
pairs of tiles are visited in the order of the forward pass, so each sum rounds
the same way in every run.

Rows of at most `_FEW` tiles use a second, unrolled program. It multiplies each
tile of queries with all its keys at once, and carries no sums from pair to
pair. It is faster while the logits of a tile of queries, [C, L], are few.

With a window, a tile of queries skips earlier keys that none of its queries
sees: whole tiles of keys in the loop, single keys in the unrolled program. The
loop also skips pairs of tiles that share no sequence in any row. Their weights
are exactly 0, so the results of real tokens have the same bits without them.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.parallel import activations

Array = jax.Array

_MASKED = -1e30  # a hidden key's logit; finite, because inf - inf is nan
_TOKENS = -2  # the axis that is cut into tiles
_FEW = 4  # the most tiles for which the loop is unrolled


def attend(
  size: int,
  tile: int,
  mesh: jax.sharding.Mesh | None,
  segment_ids_BL: Array | None = None,
  window: int = 0,
) -> Callable[[Array, Array, Array], Array]:
  """Returns a causal attention function that computes in tiles.

  `attention.causal_attention` describes the arguments and the result of the
  function.

  Args:
    size: the number of tokens of a row with its padding.
    tile: the largest number of tokens in a tile.
    mesh: mesh that activations are laid out on; None: one device.
    segment_ids_BL: int32, the number of each token's sequence; 0 at padding.
      The tokens of a sequence are neighbours. None: every row is one sequence,
      and its padding comes last.
    window: the largest number of tokens that a query sees; 0: no limit.
  """
  num_tiles = -(-size // tile)
  tile = -(-size // num_tiles)  # equal tiles have the least padding
  padded = num_tiles * tile
  mix: Any = _mix_in_loop  # Any, because custom_vjp hides the function's type
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
    # Padding comes last, so the causal mask hides padded keys from all queries
    # of real tokens. The results of padded queries are cut off below.
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
  def add_pair(sums, pair):
    queries, keys = pair
    mixed, total, largest = (_cut(x, queries, tile) for x in sums)
    logits = _pair_logits(q_BKRLH, k_BKLH, ids_BL, pair, tile, window)
    # The sums over earlier keys are relative to the old largest logit, so they
    # are rescaled to the new largest logit before new terms are added.
    raised = jnp.maximum(largest, jnp.max(logits, axis=-1, keepdims=True))
    weights, rescale = jnp.exp(logits - raised), jnp.exp(largest - raised)
    v = _cut(v_BKLH, keys, tile)
    mixed = mixed * rescale + _sum('bkrlj,bkjh->bkrlh', weights, v)
    total = total * rescale + jnp.sum(weights, axis=-1, keepdims=True)
    updated = (mixed, total, raised)
    return tuple(
      _put(x, y, queries, tile) for x, y in zip(sums, updated, strict=True)
    )

  zeros = jnp.zeros(q_BKRLH.shape, jnp.float32)
  start = (zeros, zeros[..., :1], zeros[..., :1] + _MASKED)
  mixed, total, largest = _sum_pairs(
    add_pair, start, q_BKRLH, ids_BL, tile, window
  )
  mixed = (mixed / total).astype(v_BKLH.dtype)
  log_total = largest + jnp.log(total)
  return mixed, (q_BKRLH, k_BKLH, v_BKLH, ids_BL, mixed, log_total)


def _backward(tile, window, residuals, gradient_BKRLH):
  q_BKRLH, k_BKLH, v_BKLH, ids_BL, mixed, log_total = residuals
  mean = _mean(gradient_BKRLH, mixed)

  # One loop over the pairs computes all three gradients, because all three need
  # the weights of a pair, which are costly to compute. A tile of queries or of
  # keys occurs in many pairs, so each pair adds to the gradients of its tiles.
  def add_pair(sums, pair):
    queries, keys = pair
    q, gradient, log_sum, centre = (
      _cut(x, queries, tile) for x in (q_BKRLH, gradient_BKRLH, log_total, mean)
    )
    k, v = (_cut(x, keys, tile) for x in (k_BKLH, v_BKLH))
    # The weights are normalised already: log_sum covers the keys of all tiles.
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
      for x, (number, y), axis in zip(sums, terms, axes, strict=True)
    )

  # The gradients of keys and values are summed in the layout [B, K, H, L],
  # which `_sum_over_queries` returns.
  inputs = (q_BKRLH, k_BKLH.swapaxes(2, 3), v_BKLH.swapaxes(2, 3))
  axes = (_TOKENS, -1, -1)
  start = tuple(jnp.zeros(x.shape, jnp.float32) for x in inputs)
  sums = _sum_pairs(add_pair, start, q_BKRLH, ids_BL, tile, window)
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

  The last tile may be shorter than the other tiles.
  """
  return _forward_unrolled(q_BKRLH, k_BKLH, v_BKLH, ids_BL, tile, window)[0]


def _forward_unrolled(q_BKRLH, k_BKLH, v_BKLH, ids_BL, tile, window):
  mixed, log_total = [], []
  for start, begin, end in _bounds(q_BKRLH, tile, window):
    # Later keys are left out: the causal mask hides them, and their products
    # would cost time.
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
    # Keys outside start:end are hidden from this tile of queries, so the tile
    # gives them a gradient of 0.
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
  """Returns (first visible key, first query, end) of each tile of queries.

  The queries of a tile, and the keys that they see, end at the same position.
  """
  L = q_BKRLH.shape[_TOKENS]
  return [
    (max(begin + 1 - window, 0) if window else 0, begin, min(begin + tile, L))
    for begin in range(0, L, tile)
  ]


def _mean(gradient: Array, mixed: Array) -> Array:
  """Returns each query's dot product of gradient and result [B, K, R, L, 1].

  The product is the weighted mean of the gradients of a query's attention
  weights. The derivative of softmax subtracts this mean from each gradient.
  """
  return _sum('bkrlh,bkrlh->bkrl', gradient, mixed)[..., None]


def _sum_over_queries(pairs_BKRLJ: Array, q_BKRLH: Array) -> Array:
  """Returns Σ_l pairs_lj q_l, also summed over query heads, as [B, K, H, J].

  H comes before J in the result, because then only q, the smaller operand, has
  to be transposed.
  """
  pairs_BKRLJ = pairs_BKRLJ.astype(q_BKRLH.dtype)
  # einsum sums over its letters in alphabetical order, and the order decides
  # how sums round. The letter g stands for R, so that the sum runs over query
  # heads before tokens, which is their order in memory.
  return _sum('bkglh,bkglj->bkhj', q_BKRLH, pairs_BKRLJ)


def _cast_like(gradients: Sequence[Array], inputs: Sequence[Array]) -> tuple:
  """Returns the gradients, each cast to the dtype of its input."""
  return tuple(x.astype(y.dtype) for x, y in zip(gradients, inputs))


def _sum_pairs(add_pair, sums, q_BKRLH, ids_BL, tile, window) -> tuple:
  """Returns the sums after `add_pair` has added pairs of tiles to them.

  Tile i of queries is paired with the tiles of keys from j to i. Tile j has the
  first key that the first query of tile i sees. Pairs of tiles that share no
  sequence in any row are skipped. `add_pair` takes the sums so far and the
  indices of both tiles, and returns the new sums.
  """
  size = q_BKRLH.shape[_TOKENS]
  queries, keys = (x.astype(np.int32) for x in np.tril_indices(size // tile))
  seen = queries * tile + 1 - (window or size) < (keys + 1) * tile
  queries, keys = queries[seen], keys[seen]
  shared_P = None
  if ids_BL is not None:
    # A sequence that is in both tiles holds all tokens between them. So it is
    # enough to compare the first query with the last key. The rows of all
    # devices decide together, which costs them one small exchange.
    first_BP, last_BP = (
      ids_BL[:, queries * tile],
      ids_BL[:, keys * tile + tile - 1],
    )
    shared_BP = (first_BP == last_BP) & (first_BP > 0)
    shared_P = jnp.any(shared_BP, axis=0) | (queries == keys)
  # The barrier makes the tile indices seem to depend on the queries. If they
  # were constants, the compiler would compute the masks of all pairs before the
  # loop in which the backward pass recomputes layers, and hold them in memory.
  pairs = jax.lax.optimization_barrier((queries, keys, q_BKRLH))[:2]

  def body(sums, item):
    pair, is_shared = item
    if is_shared is None:
      return add_pair(sums, pair), None
    skip = lambda sums, _: sums
    return jax.lax.cond(is_shared, add_pair, skip, sums, pair), None

  return jax.lax.scan(body, sums, (pairs, shared_P))[0]


def _pair_logits(
  q_BKRLH: Array,
  k_BKLH: Array,
  ids_BL: Array | None,
  pair: tuple[Array, Array],
  tile: int,
  window: int,
) -> Array:
  """Returns the float32 logits of a pair of tiles [B, K, R, C, C]."""
  queries, keys = pair
  q, k = _cut(q_BKRLH, queries, tile), _cut(k_BKLH, keys, tile)
  ids = None
  if ids_BL is not None:
    ids = _cut(ids_BL, queries, tile, 1), _cut(ids_BL, keys, tile, 1)
  return _logits(q, k, ids, (queries - keys) * tile, window)


def _some_ids(ids_BL: Array | None, queries: slice, keys: slice):
  """Returns the segment ids of a slice of queries and of a slice of keys."""
  return None if ids_BL is None else (ids_BL[:, queries], ids_BL[:, keys])


def _logits(
  q_BKRLH: Array,
  k_BKJH: Array,
  ids: tuple[Array, Array] | None,
  offset: Array | int,
  window: int,
) -> Array:
  """Returns float32 logits [B, K, R, L, J], _MASKED for hidden keys.

  Query l sees the keys up to l + offset. If `window` is not 0, query l sees
  only the last `window` of these keys. If `ids` are given (segment ids of the
  queries and of the keys), a query sees only the keys of its own segment.
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
  """Returns the einsum of x and y; x is cast to y's dtype, sums are float32."""
  return jnp.einsum(
    equation, x.astype(y.dtype), y, preferred_element_type=jnp.float32
  )


def _cut(x: Array, number: Array, tile: int, axis: int = _TOKENS) -> Array:
  """Returns tile `number` of x along an axis."""
  return jax.lax.dynamic_slice_in_dim(x, number * tile, tile, axis=axis)


def _put(
  x: Array, y: Array, number: Array, tile: int, axis: int = _TOKENS
) -> Array:
  """Returns x with its tile `number` replaced by y."""
  return jax.lax.dynamic_update_slice_in_dim(x, y, number * tile, axis=axis)
