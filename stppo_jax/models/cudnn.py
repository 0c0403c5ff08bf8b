"""Causal attention by cuDNN's fused kernel for GPUs, which skips padding.

B rows, L tokens, N query heads, K heads of keys and of values, H head size.

JAX's public interface to the kernel has the lengths of rows, but no segments.
So each sequence gets a row of its own, for attention alone. Copying queries,
keys, values and results takes little time beside the products of a layer, and
the kernel computes nothing for the padding.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from stppo_jax.parallel import activations
from stppo_jax.parallel import rows

Array = jax.Array
Attend = Callable[[Array, Array, Array], Array]


def attend(
  size: int,
  *,
  lengths_B: Array | None,
  mesh: jax.sharding.Mesh | None,
  segments: Any = None,
) -> Attend:
  """Returns `attend` of `attention.causal_attention`, by the kernel.

  Args:
    size, lengths_B, mesh, segments: see `attention.causal_attention`.
  """
  if segments is not None:
    return _of_sequences(segments, mesh)
  options: dict[str, Any] = {'is_causal': True, 'implementation': 'cudnn'}
  valid_BL11 = None
  if lengths_B is not None:
    valid_BL = jnp.arange(size)[None] < lengths_B[:, None]
    valid_BL11 = valid_BL[:, :, None, None]
    # An empty row would make the kernel divide by zero.
    lengths_B = jnp.maximum(lengths_B, 1).astype(jnp.int32)
    options['query_seq_lengths'] = options['key_value_seq_lengths'] = lengths_B

  def attend_rows(q_BLNH, k_BLKH, v_BLKH):
    inputs = (q_BLNH, k_BLKH, v_BLKH)
    if mesh is not None:  # the kernel needs all three sharded alike
      inputs = (
        activations.spread_heads(x, q_BLNH.shape[2], mesh) for x in inputs
      )
    if valid_BL11 is None:
      return jax.nn.dot_product_attention(*inputs, **options)
    # At padding the kernel writes arbitrary numbers, in the gradients too. So
    # zeros are selected there before the kernel and after it.
    inputs = (jnp.where(valid_BL11, x, 0) for x in inputs)
    mixed_BLNH = jax.nn.dot_product_attention(*inputs, **options)
    return jnp.where(valid_BL11, mixed_BLNH, 0)

  return attend_rows


def _of_sequences(segments: Any, mesh: jax.sharding.Mesh | None) -> Attend:
  """Returns `attend` of sequences that share rows.

  s devices hold rows, each b sequences of at most L tokens, and p places for
  tokens in its rows.
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
  attend_alone = attend(L, lengths_B=lengths_sb1.reshape(s * b), mesh=mesh)

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
