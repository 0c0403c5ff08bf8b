"""Computes attention, the mean of values weighted by how keys fit a query.

B rows, L queries, J keys, N query heads, K heads of keys and of values,
R = N / K query heads that share one of them, H head size. Sharing is that of
grouped-query attention (Ainslie et al., 2023, arXiv 2305.13245).

`attention` is the definition: it takes any mask and runs everywhere. Whole
sequences use `causal_attention`, which computes in tiles (`blockwise`) or by a
kernel of the platform. They support causal masks only, with or without a
window, so reading from a cache always uses `attend_to_slices`.
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

# Finite, so that a query which sees nothing gets finite numbers, not nan.
_MASKED = -1e30
# Tokens of a tile. On a CPU tiles are small, so that the logits of a pair of
# tiles stay in its cache; elsewhere each tile must be worth starting a kernel.
_CPU_TILE, _TILE = 80, 512


def attention(
  q_BLNH: Array, k_BKJH: Array, v_BKJH: Array, visible_BLJ: Array
) -> Array:
  """Returns softmax(q k / √H) v, [B, L, N, H].

  Logits are float32. Keys are broadcast over the query heads that share them,
  never repeated.

  Args:
    q_BLNH: queries.
    k_BKJH, v_BKJH: keys and values.
    visible_BLJ: bool, the keys that each query sees; its B may be 1.
  """
  q_BKRLH = split_heads(q_BLNH, k_BKJH.shape[1])
  weights, total, _ = _weights(q_BKRLH, k_BKJH, visible_BLJ)
  # Normalised after the product with v: H divisions a query instead of J.
  mixed = _mix(weights, v_BKJH)
  return join_heads(mixed / total.astype(mixed.dtype))


class Segments(NamedTuple):
  """Tells which tokens of a row belong to which of several sequences.

  Attributes:
    ids_BL: int32, the sequence 1..count that a token belongs to; 0 at padding.
      A number stands for one sequence in all rows of a device.
    positions_BL: int32, the position of a token in its sequence.
    count: the most sequences of a device; static.
    size: the most tokens of a sequence; static.
  """

  ids_BL: Array
  positions_BL: Array
  count: int
  size: int


class KeySlice(NamedTuple):
  """Holds some of the keys and values that queries attend to.

  Attributes:
    k_BKJH, v_BKJH: keys and values; each slice has its own J.
    visible_BLJ: bool, the keys that each query sees; its B and L may be 1.
    scales: (k_scale_BKJ1, v_scale_BKJ1), the factors of keys and values of type
      int8; None: keys and values are used as they are.
  """

  k_BKJH: Array
  v_BKJH: Array
  visible_BLJ: Array
  scales: tuple[Array, Array] | None = None


class Page(NamedTuple):
  """Describes a slice that is read only if it is needed.

  Attributes:
    needed: scalar bool. It may be false if no query sees any key of this page
      and of those after it; then none of them is read.
    read: returns the slice.
  """

  needed: Array | bool
  read: Callable[[], KeySlice]


# The sums of values weighted by exp(logit - largest) [B, K, R, L, H], the sums
# of these weights, and the largest logits [B, K, R, L, 1].
_Sums = tuple[Array, Array, Array]


def attend_to_slices(
  q_BLNH: Array,
  own: KeySlice,
  pages: Sequence[Page],
  *,
  num_kv_heads: int,
) -> Array:
  """Returns attention to own keys and to pages as if they were one array.

  Each slice is reduced by itself to (weighted values, sum of weights, largest
  logit), and added to those before it, after both have been rescaled to the
  larger of their largest logits. A slice of which a query sees nothing has the
  largest logit _MASKED, so its scale is exp(_MASKED - largest) = 0 exactly, and
  that of the others is exp(0) = 1. Therefore no bit of the result depends on
  whether such a slice is read: programs that read different numbers of cached
  pages agree to the last bit.

  Args:
    q_BLNH: queries.
    own: keys and values, of which each query sees at least one.
    pages: keys and values that may be left out.
    num_kv_heads: K.
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
    # The pages are halved again and again, so that one branch skips many pages,
    # and few branches are nested.
    if half := len(pages) // 2:
      return with_pages(with_needed(sums, pages[:half]), pages[half:])
    return _added(sums, reduced(pages[0].read()))

  mixed, total, largest = reduced(own)
  sums = mixed.astype(jnp.float32), total, largest
  mixed, total, _ = with_pages(sums, pages)
  return join_heads((mixed / total).astype(q_BLNH.dtype))


def _added(one: _Sums, other: _Sums) -> _Sums:
  """Returns the sums over two disjoint sets of keys; float32."""
  largest = jnp.maximum(one[2], other[2])
  scales = [jnp.exp(x[2] - largest) for x in (one, other)]
  mixed, total = (one[n] * scales[0] + other[n] * scales[1] for n in (0, 1))
  return mixed, total, largest


def split_heads(q_BLNH: Array, K: int) -> Array:
  """Returns q / √H as [B, K, R, L, H], the layout of every product below."""
  B, L, N, H = q_BLNH.shape
  # On a TPU, an array whose second last axis is as short as R would be padded
  # to whole tiles. Therefore no array has R there.
  q_BNLH = (q_BLNH * H**-0.5).swapaxes(1, 2)
  return q_BNLH.reshape(B, K, N // K, L, H)


def _weights(
  q_BKRLH: Array,
  k_BKJH: Array,
  visible_BLJ: Array,
  *,
  k_scale_BKJ1: Array | None = None,
) -> tuple[Array, Array, Array]:
  """Returns exp(logits - largest) [B, K, R, L, J], their sum, and largest."""
  if k_scale_BKJ1 is not None:
    k_BKJH = k_BKJH.astype(q_BKRLH.dtype)
  # In the equations here and in `_mix`, n is R and L as one axis.
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
  """Returns scales in the layout of logits and weights, [B, K, 1, 1, J]."""
  return x_BKJ1[:, :, None, None, :, 0]


def _mix(weights: Array, v_BKJH: Array) -> Array:
  """Returns the weighted sums of the values [B, K, R, L, H]."""
  return _matmul('bknj,bkjh->bknh', weights.astype(v_BKJH.dtype), v_BKJH)


def _matmul(equation: str, x: Array, y: Array, **options) -> Array:
  """Returns x [B, K, R, L, ...] times y, with R and L of x as one axis."""
  B, K, R, L, _ = x.shape
  flat = jnp.einsum(equation, x.reshape(B, K, R * L, -1), y, **options)
  return flat.reshape(B, K, R, L, -1)


def join_heads(mixed: Array) -> Array:
  """Returns [B, K, R, L, H] as [B, L, N, H]."""
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
  """Returns a function for causal attention within sequences.

  Call it once, outside a scan over layers, so that masks are made once for all
  layers.

  Args:
    name: a key of `IMPLEMENTATIONS`.
    size: L, tokens of a row with its padding.
    lengths_B: int32, tokens of each row without padding; None: all.
    mesh: mesh that activations are laid out on; None: one device.
    segments: the sequences in each row. Tokens see those of their own sequence
      only. None: every row is one right-padded sequence.
    window: the number of tokens that a query sees at most, its own and those
      before it; 0: all of them.

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
    name: one of these keys, or 'auto' for the fastest that runs here.
    dtype: name of the activations' dtype.
    head_dim: H.
    platform: 'cpu', 'gpu' or 'tpu'.

  Raises:
    ValueError: the implementation does not run here; the message lists those
      that do.
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
  """Returns attention that runs everywhere: by the definition, or in tiles.

  Padding follows all text, so the causal mask hides it already and the lengths
  are not needed.
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
