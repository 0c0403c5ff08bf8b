"""Causal attention by the splash attention kernel for TPU.

B rows, L tokens, N query heads, K heads of keys and of values, H head size.
Inside the kernel L includes the padding to whole tiles.

The kernel works on tiles of at least 128 tokens and skips those that the causal
mask leaves empty. The sequences of a row and its padding are segments, which do
not attend to each other.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from stppo_jax.parallel import activations

Array = jax.Array

# Tokens of a tile; the first size that divides the padded length is used. Rows
# that are longer than the largest tile are padded to whole tiles of that size,
# because with smaller tiles the kernel starts more often and reads keys and
# values again.
_TILES = (512, 256, 128)


def attend(
  size: int,
  *,
  lengths_B: Array | None,
  mesh: jax.sharding.Mesh | None,
  segments: Any = None,
  interpret: bool = False,
) -> Callable[[Array, Array, Array], Array]:
  """Returns `attend` of `attention.causal_attention`, by the kernel.

  Args:
    size, lengths_B, mesh, segments: see `attention.causal_attention`.
    interpret: whether to run the kernel's program without a TPU.
  """
  # Imported here because it takes a fifth of a second and only a TPU needs it.
  from jax.experimental.pallas.ops.tpu import splash_attention

  unit = _TILES[0] if size > _TILES[0] else _TILES[-1]
  padded = -(-size // unit) * unit

  def mix(q_BLNH, k_BLKH, v_BLKH, segments_BL):
    kernel: Any = _kernel(splash_attention, q_BLNH.shape[2], padded, interpret)
    to_heads = lambda x: _padded(x, padded).swapaxes(1, 2)
    ids = splash_attention.SegmentIds(q=segments_BL, kv=segments_BL)
    q_BNLH = to_heads(q_BLNH * q_BLNH.shape[-1] ** -0.5)
    mixed_BNLH = jax.vmap(kernel)(
      q_BNLH, to_heads(k_BLKH), to_heads(v_BLKH), ids
    )
    return mixed_BNLH.swapaxes(1, 2)[:, :size]

  def attend_rows(q_BLNH, k_BLKH, v_BLKH):
    rows = q_BLNH.shape[0]
    if segments is not None:
      ids_BL = segments.ids_BL
    else:
      lengths = jnp.full(rows, size) if lengths_B is None else lengths_B
      ids_BL = jnp.arange(size)[None] < lengths[:, None]
    k_BLKH, v_BLKH = (
      activations.spread_heads(x, q_BLNH.shape[2], mesh)
      for x in (k_BLKH, v_BLKH)
    )
    segments_BL = jnp.pad(ids_BL, ((0, 0), (0, padded - size)))
    segments_BL = segments_BL.astype(jnp.int32)
    inputs = (q_BLNH, k_BLKH, v_BLKH, segments_BL)
    if mesh is None or mesh.size == 1:
      return mix(*inputs)
    # The compiler cannot partition a kernel: each device runs it on its shard.
    row = _dividing_axes(mesh, activations.ROWS, rows)
    heads = P(
      row, None, _dividing_axes(mesh, activations.TENSOR, k_BLKH.shape[2])
    )
    return jax.shard_map(
      mix,
      mesh=mesh,
      in_specs=(heads, heads, heads, P(row)),
      out_specs=heads,
      check_vma=False,  # the kernel does not declare which axes vary
    )(*inputs)

  return attend_rows


def _kernel(splash_attention, num_heads: int, padded: int, interpret: bool):
  """Returns the kernel for one row, with one tile size for all its loops."""
  tile = next(size for size in _TILES if padded % size == 0)
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
    block_sizes=splash_attention.BlockSizes(**dict.fromkeys(names, tile)),
    head_shards=1,
    q_seq_shards=1,
    interpret=interpret,
  )


def _padded(x_BLNH: Array, padded: int) -> Array:
  """Returns x with zeros up to `padded` tokens."""
  missing = padded - x_BLNH.shape[1]
  return jnp.pad(x_BLNH, ((0, 0), (0, missing), (0, 0), (0, 0)))


def _dividing_axes(mesh: jax.sharding.Mesh, axes, size: int):
  """Returns the axes if they divide the dimension, otherwise None."""
  return axes if size % activations.extent(mesh, axes) == 0 else None
