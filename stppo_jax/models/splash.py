"""Causal attention by the splash kernel, which is for TPU.

B rows, L tokens, P padded tokens, Q query heads, K key/value heads, H head
size.

The kernel works on blocks of at least 128 tokens and skips those that the
causal mask leaves empty. Sequences are padded to whole blocks; text and padding
are two segments, which do not see each other.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from stppo_jax.parallel import activations

Array = jax.Array

_BLOCKS = (512, 256, 128)  # tokens; the first that divides is taken
_TEXT, _PADDING = 1, 0


def attend(
  size: int,
  lengths_B: Array | None,
  mesh: jax.sharding.Mesh | None,
  *,
  interpret: bool = False,
) -> Callable[[Array, Array, Array], Array]:
  """See `attention.whole`; `interpret` runs the kernel without a TPU."""
  # Late: a fifth of a second that nobody but a TPU needs.
  from jax.experimental.pallas.ops.tpu import splash_attention

  padded = -(-size // _BLOCKS[-1]) * _BLOCKS[-1]

  def mix(q_BLQH, k_BLKH, v_BLKH, segments_BP):
    kernel = _kernel(splash_attention, q_BLQH.shape[2], padded, interpret)
    to_heads = lambda x: _padded(x, padded).swapaxes(1, 2)
    ids = splash_attention.SegmentIds(q=segments_BP, kv=segments_BP)
    q_BQPH = to_heads(q_BLQH * q_BLQH.shape[-1] ** -0.5)
    mixed_BQPH = jax.vmap(kernel)(
      q_BQPH, to_heads(k_BLKH), to_heads(v_BLKH), ids
    )
    return mixed_BQPH.swapaxes(1, 2)[:, :size]

  def whole(q_BLQH, k_BLKH, v_BLKH):
    rows = q_BLQH.shape[0]
    lengths = lengths_B
    if lengths is None:
      lengths = jnp.full((rows,), size)
    text_BP = jnp.arange(padded)[None] < lengths[:, None]
    segments_BP = jnp.where(text_BP, _TEXT, _PADDING).astype(jnp.int32)
    inputs = (q_BLQH, k_BLKH, v_BLKH, segments_BP)
    if mesh is None or mesh.size == 1:
      return mix(*inputs)
    # The compiler cannot cut a kernel: each device runs it on its own part.
    row = _cut(mesh, activations.ROWS, rows)
    heads = P(row, None, _cut(mesh, activations.TENSOR, k_BLKH.shape[2]))
    return jax.shard_map(
      mix,
      mesh=mesh,
      in_specs=(heads, heads, heads, P(row)),
      out_specs=heads,
      check_vma=False,  # the kernel does not say what varies where
    )(*inputs)

  return whole


def _kernel(splash_attention, num_heads: int, padded: int, interpret: bool):
  block = next(size for size in _BLOCKS if padded % size == 0)
  causal = splash_attention.CausalMask((padded, padded))
  names = (
    'block_q',
    'block_kv',
    'block_kv_compute',
    'block_q_dkv',
    'block_kv_dkv',
    'block_kv_dkv_compute',
    'block_q_dq',
    'block_kv_dq',
  )
  return splash_attention.make_splash_mha(
    splash_attention.MultiHeadMask([causal] * num_heads),
    block_sizes=splash_attention.BlockSizes(**dict.fromkeys(names, block)),
    head_shards=1,
    q_seq_shards=1,
    interpret=interpret,
  )


def _padded(x_BLNH: Array, padded: int) -> Array:
  widths = [(0, 0)] * x_BLNH.ndim
  widths[1] = (0, padded - x_BLNH.shape[1])
  return jnp.pad(x_BLNH, widths)


def _cut(mesh: jax.sharding.Mesh, axes, size: int):
  """The axes if they divide the dimension, otherwise it is whole."""
  return axes if size % activations.extent(mesh, axes) == 0 else None
