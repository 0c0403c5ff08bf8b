"""Computes attention: for each query, a weighted mean of the values.

Shape letters: B rows of a batch, L queries of a row, J keys, N query heads, K
key and value heads, R = N / K query heads that share one key and value head, H
size of a head. Heads are shared as in grouped-query attention (Ainslie et al.,
2023, arXiv 2305.13245).

`attention` computes attention by its definition, takes any mask and runs on
every platform. `causal_attention` is for whole sequences. It uses a fused
kernel (`fused_attention`) or computes long sequences in tiles (`blockwise`).
Tiles and fused kernels support causal masks only, with or without a window. A
KV cache is read by `attend_to_slices`, or by a kernel of the package `kernels`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax.models import blockwise
from stppo_jax.models import fused_attention
from stppo_jax.parallel import mesh as mesh_lib

Array = jax.Array
Attend = Callable[[Array, Array, Array], Array]

# The logit of a hidden key. It is finite, so that a query which sees no key
# gets finite numbers and not nan.
_MASKED = -1e30
# Tokens of a tile, on a CPU and on other platforms. On a CPU, tiles are small
# so that the logits of one tile of queries and one tile of keys stay in the
# processor's cache. Elsewhere, tiles are large so that fewer kernels start.
_CPU_TILE, _TILE = 80, 512


def attention(
  q_BLNH: Array, k_BKJH: Array, v_BKJH: Array, visible_BLJ: Array
) -> Array:
  """Returns softmax(q k / √H) v, [B, L, N, H].

  The logits are float32. Keys and values are not copied for the query heads
  that share them.

  Args:
    q_BLNH: queries.
    k_BKJH, v_BKJH: keys and values.
    visible_BLJ: bool, true where a query sees a key; the axis B may have size
      1.
  """
  q_BKRLH = split_heads(q_BLNH, k_BKJH.shape[1])
  weights, total, _ = _weights(q_BKRLH, k_BKJH, visible_BLJ)
  # Dividing after the product with v takes H divisions per query instead of J.
  mixed = _mix(weights, v_BKJH)
  return join_heads(mixed / total.astype(mixed.dtype))


class Segments(NamedTuple):
  """Tells which sequence of its row each token belongs to.

  Attributes:
    ids_BL: int32, the number 1..count of each token's sequence; 0 at padding.
      All sequences on a device have different numbers, also in different rows.
    positions_BL: int32, the position of each token in its sequence.
    count: the largest number of sequences on a device; static.
    size: the largest number of tokens in a sequence; static.
  """

  ids_BL: Array
  positions_BL: Array
  count: int
  size: int


class KeySlice(NamedTuple):
  """Holds some of the keys and values that queries attend to.

  Attributes:
    k_BKJH, v_BKJH: keys and values; J may differ between slices.
    visible_BLJ: bool, true where a query sees a key; the axes B and L may have
      size 1.
    scales: (k_scale_BKJ1, v_scale_BKJ1), the factors that restore keys and
      values from int8; None: keys and values are not quantised.
  """

  k_BKJH: Array
  v_BKJH: Array
  visible_BLJ: Array
  scales: tuple[Array, Array] | None = None


class Page(NamedTuple):
  """Describes a slice of keys and values that is read only if it is needed.

  Attributes:
    needed: scalar bool. If it is false, neither this page nor any page after
      it is read. It may be false only if no query sees any key of these pages.
    read: function without arguments that returns the slice.
  """

  needed: Array | bool
  read: Callable[[], KeySlice]


# Partial results of attention over some of the keys: the sums of the values
# weighted by exp(logit - largest) [B, K, R, L, H], the sums of these weights
# [B, K, R, L, 1], and the largest logits [B, K, R, L, 1].
_Sums = tuple[Array, Array, Array]


def attend_to_slices(
  q_BLNH: Array,
  own: KeySlice,
  pages: Sequence[Page],
  *,
  num_kv_heads: int,
) -> Array:
  """Returns attention [B, L, N, H] to the keys of `own` and of all pages.

  Each slice is first reduced alone to its partial results, see `_Sums`. The
  slices are then combined one after another: the partial results of a slice and
  of all slices before are rescaled to the larger of their two largest logits,
  and added. If a query sees no key of a slice, the largest logit of the slice
  is _MASKED. The slice is then rescaled by exp(_MASKED - largest) = 0 exactly,
  and the slices before by exp(0) = 1. Therefore reading a slice of which a
  query sees no key changes no bit of the query's result, and programs that read
  different numbers of cached pages agree to the last bit.

  Args:
    q_BLNH: queries.
    own: keys and values that are always read. Each query sees at least one of
      these keys.
    pages: keys and values that are read only if they are needed.
    num_kv_heads: K, the number of key and value heads.
  """
  q_BKRLH = split_heads(q_BLNH, num_kv_heads)

  def reduced(key_slice):
    k_scale, v_scale = key_slice.scales or (None, None)
    weights, total, largest = _weights(
      q_BKRLH, key_slice.k_BKJH, key_slice.visible_BLJ, k_scale_BKJ1=k_scale
    )
    v_BKJH = key_slice.v_BKJH
    if v_scale is not None:
      weights = weights * _per_key(v_scale)
      v_BKJH = v_BKJH.astype(q_BLNH.dtype)
    return _mix(weights, v_BKJH), total, largest

  def with_pages(sums, pages):
    if not pages:
      return sums
    if pages[0].needed is True:
      return with_needed(sums, pages)
    return jax.lax.cond(
      pages[0].needed,
      lambda sums: with_needed(sums, pages),
      lambda sums: sums,
      sums,
    )

  def with_needed(sums, pages):
    # The pages are halved recursively, so that one branch can skip many pages
    # and few branches are nested.
    if half := len(pages) // 2:
      return with_pages(with_needed(sums, pages[:half]), pages[half:])
    return _added(sums, reduced(pages[0].read()))

  mixed, total, largest = reduced(own)
  sums = mixed.astype(jnp.float32), total, largest
  mixed, total, _ = with_pages(sums, pages)
  return join_heads((mixed / total).astype(q_BLNH.dtype))


def _added(one: _Sums, other: _Sums) -> _Sums:
  """Returns the float32 partial results over the keys of `one` and `other`.

  `one` and `other` are partial results over disjoint sets of keys.
  """
  largest = jnp.maximum(one[2], other[2])
  scales = [jnp.exp(x[2] - largest) for x in (one, other)]
  mixed, total = (one[n] * scales[0] + other[n] * scales[1] for n in (0, 1))
  return mixed, total, largest


def split_heads(q_BLNH: Array, K: int) -> Array:
  """Returns q / √H as [B, K, R, L, H], the layout that attention computes in.

  The package `kernels` takes queries in this layout too.
  """
  B, L, N, H = q_BLNH.shape
  # A TPU pads the second last axis of an array to whole tiles, which would be
  # mostly padding for an axis as short as R. So R is never the second last.
  q_BNLH = (q_BLNH * H**-0.5).swapaxes(1, 2)
  return q_BNLH.reshape(B, K, N // K, L, H)


def _weights(
  q_BKRLH: Array,
  k_BKJH: Array,
  visible_BLJ: Array,
  *,
  k_scale_BKJ1: Array | None = None,
) -> tuple[Array, Array, Array]:
  """Returns the weights, their sum per query, and the largest logit per query.

  The weights are exp(logit - largest logit) [B, K, R, L, J].
  """
  if k_scale_BKJ1 is not None:
    k_BKJH = k_BKJH.astype(q_BKRLH.dtype)
  # In the equations here and in `_mix`, the letter n stands for the axes R and
  # L merged into one.
  logits = _matmul(
    'bknh,bkjh->bknj', q_BKRLH, k_BKJH, preferred_element_type=jnp.float32
  )
  if k_scale_BKJ1 is not None:
    logits = logits * _per_key(k_scale_BKJ1)
  logits = jnp.where(visible_BLJ[:, None, None], logits, _MASKED)
  # The largest logit cancels out of softmax, so it carries no gradient.
  largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
  weights = jnp.exp(logits - largest)
  return weights, jnp.sum(weights, axis=-1, keepdims=True), largest


def _per_key(x_BKJ1: Array) -> Array:
  """Returns the scales as [B, K, 1, 1, J], to multiply logits or weights."""
  return x_BKJ1[:, :, None, None, :, 0]


def _mix(weights: Array, v_BKJH: Array) -> Array:
  """Returns each query's weighted sum of the values [B, K, R, L, H]."""
  return _matmul('bknj,bkjh->bknh', weights.astype(v_BKJH.dtype), v_BKJH)


def _matmul(equation: str, x: Array, y: Array, **options) -> Array:
  """Returns the einsum of x and y, with the axes R and L of x merged into one.

  In the result [B, K, R, L, ...], the two axes are separate again.
  """
  B, K, R, L, _ = x.shape
  flat = jnp.einsum(equation, x.reshape(B, K, R * L, -1), y, **options)
  return flat.reshape(B, K, R, L, -1)


def join_heads(mixed: Array) -> Array:
  """Returns an array [B, K, R, L, H] rearranged to [B, L, N, H]."""
  B, K, R, L, H = mixed.shape
  return mixed.reshape(B, K * R, L, H).swapaxes(1, 2)


def causal_attention(
  name: str,
  size: int,
  *,
  lengths_B: Array | None,
  mesh: jax.sharding.Mesh | None,
  segments: Segments | None = None,
  window: int = 0,
) -> Attend:
  """Returns a function that computes causal attention within sequences.

  Callers call `causal_attention` outside a scan over layers, so that masks are
  made once for all layers.

  Args:
    name: a key of `IMPLEMENTATIONS`.
    size: L, the number of tokens of a row with its padding.
    lengths_B: int32, the number of tokens of each row without padding; None:
      rows have no padding.
    mesh: mesh that activations are laid out on; None: one device.
    segments: the sequences in each row. A token sees only tokens of its own
      sequence. None: every row is one right-padded sequence.
    window: the largest number of tokens that a query sees, its own token and
      the tokens before it; 0: no limit.

  Returns:
    A function of (q_BLNH, k_BLKH, v_BLKH) that returns [B, L, N, H]. At padding
    its result is finite and has no meaning.
  """
  return IMPLEMENTATIONS[name](
    size,
    lengths_B=lengths_B,
    mesh=mesh,
    segments=segments,
    window=window if window < size else 0,
  )


def choose(name: str, *, dtype: str, head_dim: int, platform: str) -> str:
  """Returns the key of `IMPLEMENTATIONS` that a config selects.

  Args:
    name: a key of `IMPLEMENTATIONS`, or 'auto' for the fastest implementation
      that supports the other arguments.
    dtype: name of the activations' dtype.
    head_dim: H, the size of a head.
    platform: 'cpu', 'gpu' or 'tpu'.

  Raises:
    ValueError: the named implementation does not support the other arguments;
      the message lists the implementations that do.
  """
  runs = {
    'cudnn': platform == 'gpu'
    and dtype in ('bfloat16', 'float16')
    and head_dim % 8 == 0
    and head_dim <= 128,
    'splash': platform == 'tpu',
    'xla': True,
  }
  here = [choice for choice, supported in runs.items() if supported]
  if name == 'auto':
    return here[0]
  if name not in here:
    raise ValueError(
      f'model.attention={name}: does not run on {platform} with '
      f'dtype={dtype}, head_dim={head_dim}; choices here: auto, '
      + ', '.join(here)
    )
  return name


def _xla(
  size: int,
  *,
  lengths_B: Array | None,
  mesh: jax.sharding.Mesh | None,
  segments: Segments | None = None,
  window: int = 0,
) -> Attend:
  """Returns a causal attention function that runs on every platform.

  Rows of at most one tile are computed by `attention`, and longer rows by
  `blockwise`. Padding follows all text, so the causal mask hides padding
  already, and `lengths_B` is not needed.
  """
  del lengths_B
  tile = _CPU_TILE if mesh_lib.platform(mesh) == 'cpu' else _TILE
  ids_BL = None if segments is None else segments.ids_BL
  if size > tile:
    return blockwise.attend(size, tile, mesh, ids_BL, window)
  visible_BLL = jnp.tril(jnp.ones((size, size), bool))[None]
  if window:
    visible_BLL = jnp.triu(visible_BLL, 1 - window)
  if ids_BL is not None:
    visible_BLL &= ids_BL[:, :, None] == ids_BL[:, None]
  return lambda q, k, v: attention(
    q, k.swapaxes(1, 2), v.swapaxes(1, 2), visible_BLL
  )


IMPLEMENTATIONS: dict[str, Callable[..., Attend]] = {
  'xla': _xla,
  'cudnn': fused_attention.cudnn,
  'splash': fused_attention.splash,
}
