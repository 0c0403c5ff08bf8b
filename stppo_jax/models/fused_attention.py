"""Computes causal attention by fused kernels: cuDNN on GPU, splash on TPU.

Shape letters: B rows, L tokens of a row, N query heads, K key and value heads,
H size of a head.

The cuDNN kernel computes nothing for padding. JAX's public interface to cuDNN
takes the length of each row, but no ids that separate several sequences of a
row. So if rows hold several sequences, each sequence is copied to a row of its
own before attention, and the results are copied back. These copies take little
time compared with the products of a layer.

The splash kernel works on tiles of at least 128 tokens, and skips tiles in
which the causal mask hides all keys. The sequences of a row, and the padding of
the row, are segments that do not attend to each other. Padding is computed like
text.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from stppo_jax.parallel import activations
from stppo_jax.parallel import rows

Array = jax.Array
Attend = Callable[[Array, Array, Array], Array]

# Possible numbers of tokens in a tile of the splash kernel. The first number
# that divides the padded length is used. Rows longer than the largest tile are
# padded to a multiple of the largest tile, because with smaller tiles the
# kernel starts more often and reads keys and values more often.
_TILES = (512, 256, 128)


def cudnn(
  size: int,
  *,
  lengths_B: Array | None,
  mesh: jax.sharding.Mesh | None,
  segments: Any = None,
  window: int = 0,
) -> Attend:
  """Returns a causal attention function that uses the cuDNN kernel.

  `attention.causal_attention` describes the arguments and the result of the
  function.

  Args:
    size, lengths_B, mesh, segments, window: see `attention.causal_attention`.
  """
  if segments is not None:
    return _of_sequences(segments, mesh, window)
  options: dict[str, Any] = {'is_causal': True, 'implementation': 'cudnn'}
  if window:
    # How many tokens before and after its own token a query sees.
    options['local_window_size'] = window - 1, 0
  valid_BL11 = None
  if lengths_B is not None:
    valid_BL = jnp.arange(size)[None] < lengths_B[:, None]
    valid_BL11 = valid_BL[:, :, None, None]
    # An empty row would make the kernel divide by zero.
    lengths_B = jnp.maximum(lengths_B, 1).astype(jnp.int32)
    options['query_seq_lengths'] = options['key_value_seq_lengths'] = lengths_B

  def attend_rows(q_BLNH, k_BLKH, v_BLKH):
    inputs = (q_BLNH, k_BLKH, v_BLKH)
    if mesh is not None:  # the kernel needs the three inputs sharded alike
      inputs = (
        activations.spread_heads(x, q_BLNH.shape[2], mesh) for x in inputs
      )
    if valid_BL11 is None:
      return jax.nn.dot_product_attention(*inputs, **options)
    # At padding the kernel writes arbitrary numbers, into the gradients too. So
    # padding is replaced by zeros before the kernel and after it.
    inputs = (jnp.where(valid_BL11, x, 0) for x in inputs)
    mixed_BLNH = jax.nn.dot_product_attention(*inputs, **options)
    return jnp.where(valid_BL11, mixed_BLNH, 0)

  return attend_rows


def _of_sequences(
  segments: Any, mesh: jax.sharding.Mesh | None, window: int
) -> Attend:
  """Returns a causal attention function for rows with several sequences.

  Shape letters: s shards that the rows are cut into, p token positions in all
  rows of a shard together, b the largest number of sequences in a shard, L the
  largest number of tokens in a sequence.
  """
  s = 1 if mesh is None else activations.extent(mesh, activations.ROWS)
  _, _, b, L = segments
  ids_sp, positions_sp = (x.reshape(s, -1) for x in segments[:2])
  p = ids_sp.shape[1]
  own_sbp = ids_sp[:, None] == 1 + jnp.arange(b)[None, :, None]
  lengths_sb1 = jnp.sum(own_sbp, axis=2, keepdims=True)
  firsts_sb1 = jnp.argmax(own_sbp, axis=2, keepdims=True)
  l_11L = jnp.arange(L)[None, None]
  places_sbL = jnp.where(l_11L < lengths_sb1, firsts_sb1 + l_11L, p)
  places_sm = places_sbL.reshape(s, b * L)
  numbers_sp = (ids_sp - 1) * L + positions_sp
  numbers_sp = jnp.where(ids_sp > 0, numbers_sp, b * L)
  attend_alone = cudnn(
    L, lengths_B=lengths_sb1.reshape(s * b), mesh=mesh, window=window
  )

  def attend_rows(q_BLNH, k_BLKH, v_BLKH):
    alone = (
      rows.take_with_inverse(
        x.reshape(s, p, *x.shape[2:]), places_sm, numbers_sp
      ).reshape(s * b, L, *x.shape[2:])
      for x in (q_BLNH, k_BLKH, v_BLKH)
    )
    mixed = attend_alone(*alone).reshape(s, b * L, *q_BLNH.shape[2:])
    return rows.take_with_inverse(mixed, numbers_sp, places_sm).reshape(
      q_BLNH.shape
    )

  return attend_rows


def splash(
  size: int,
  *,
  lengths_B: Array | None,
  mesh: jax.sharding.Mesh | None,
  segments: Any = None,
  window: int = 0,
  interpret: bool = False,
) -> Attend:
  """Returns a causal attention function that uses the splash kernel.

  `attention.causal_attention` describes the arguments and the result of the
  function.

  Args:
    size, lengths_B, mesh, segments, window: see `attention.causal_attention`.
    interpret: whether to interpret the kernel, which then needs no TPU.
  """
  # Imported here because the import takes a fifth of a second and only a TPU
  # needs it.
  from jax.experimental.pallas.ops.tpu import splash_attention

  unit = _TILES[0] if size > _TILES[0] else _TILES[-1]
  padded = -(-size // unit) * unit

  def mix(q_BLNH, k_BLKH, v_BLKH, segments_BL):
    mask = splash_attention.CausalMask((padded, padded))
    if window:
      mask = splash_attention.LocalMask((padded, padded), (window - 1, 0), 0)
    masks = splash_attention.MultiHeadMask([mask] * q_BLNH.shape[2])
    kernel: Any = _kernel(splash_attention, masks, padded, interpret)
    widths = (0, 0), (0, padded - size), (0, 0), (0, 0)
    to_heads = lambda x: jnp.pad(x, widths).swapaxes(1, 2)
    ids = splash_attention.SegmentIds(q=segments_BL, kv=segments_BL)
    q_BNLH = to_heads(q_BLNH * q_BLNH.shape[-1] ** -0.5)
    mixed_BNLH = jax.vmap(kernel)(
      q_BNLH, to_heads(k_BLKH), to_heads(v_BLKH), ids
    )
    return mixed_BNLH.swapaxes(1, 2)[:, :size]

  def attend_rows(q_BLNH, k_BLKH, v_BLKH):
    if segments is not None:
      ids_BL = segments.ids_BL
    else:
      lengths = lengths_B
      if lengths is None:
        lengths = jnp.full(q_BLNH.shape[0], size)
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
    # The compiler cannot partition a kernel, so each device runs the kernel on
    # its own shard.
    axes = activations.ROWS, None, activations.TENSOR
    heads = activations.fitting(axes, k_BLKH.shape, mesh)
    return jax.shard_map(
      mix,
      mesh=mesh,
      in_specs=(heads, heads, heads, P(heads[0])),
      out_specs=heads,
      # A kernel does not declare along which mesh axes its results differ, so
      # JAX cannot check these axes.
      check_vma=False,
    )(*inputs)

  return attend_rows


def _kernel(splash_attention, masks, padded: int, interpret: bool):
  """Returns the splash kernel for one row of `padded` tokens.

  All loops of the kernel use the same tile size.
  """
  tile = next(size for size in _TILES if padded % size == 0)
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
    masks,
    block_sizes=splash_attention.BlockSizes(**dict.fromkeys(names, tile)),
    head_shards=1,
    q_seq_shards=1,
    interpret=interpret,
  )
