"""Cuts the large matrices of decoding weights into pieces.

While a TPU computes, its compiler copies the weights of later products into the
fast memory of the chip, so that these products need not wait for them. The fast
memory is small, and the compiler copies a matrix as a whole. Of an array that
is a quarter of this memory or larger, often none is copied in time. Therefore,
each matrix above a limit is held as several arrays, its pieces.

A matrix [in, out] is cut along an axis that is not sharded, so that no device
needs another device's part. If `out` is cut, the result of a product is the
concatenation of the results of the pieces. If `in` is cut, it is their sum.
"""

from collections.abc import Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp

from stppo_jax.parallel import mesh as mesh_lib

Array = jax.Array
Pieces = tuple[Array, ...]
# Platform -> the most bytes of a matrix, or of a piece, on a device. By the
# estimate of the compiler for v5p, pieces of half this size are as good.
MOST_BYTES: Mapping[str, int] = {'tpu': 24 << 20}
# With more rows than this, the time of a product is not that of reading its
# weights. Sums of large results would then cost more than they save.
_FEW_ROWS = 1024


def cut_layers(weights: Mapping[str, Any], mesh: jax.sharding.Mesh) -> Any:
  """Returns weights whose large matrices are cut, and deletes these matrices.

  Args:
    weights: arrays, or shapes with shardings. The layers, a separate tree for
      each, are in the tuple 'layers'; only their matrices are cut.
    mesh: the mesh of the weights, which tells the platform.

  Returns:
    The weights, with a tuple of pieces in place of each matrix that was cut.
  """
  most = MOST_BYTES.get(mesh_lib.platform(mesh))
  if most is None:
    return weights
  cut = functools.partial(_cut, most=most)
  return {**weights, 'layers': jax.tree.map(cut, weights['layers'])}


def product(x_NI: Array, kernel: Array | Pieces) -> Array:
  """Returns x @ kernel [N, O], in the dtype of x.

  Args:
    x_NI: N rows.
    kernel: a matrix [I, O], or its pieces.
  """
  if not isinstance(kernel, tuple):
    return x_NI @ kernel.astype(x_NI.dtype)
  pieces = [piece.astype(x_NI.dtype) for piece in kernel]
  axis = 0 if pieces[0].shape[0] < x_NI.shape[1] else 1
  if len(x_NI) > _FEW_ROWS:
    return x_NI @ jnp.concatenate(pieces, axis)
  if axis:
    return jnp.concatenate([x_NI @ piece for piece in pieces], axis)
  # The sum is rounded once, as the sum within one product is.
  parts = [
    jnp.matmul(x, piece, preferred_element_type=jnp.float32)
    for x, piece in zip(jnp.split(x_NI, len(pieces), axis=1), pieces)
  ]
  return sum(parts[1:], start=parts[0]).astype(x_NI.dtype)


def _cut(x: Any, *, most: int) -> Any:
  """Returns the pieces of a large matrix, and other leaves as they are."""
  if x.ndim != 2:
    return x
  shard = x.sharding.shard_shape(x.shape)
  whole = [axis for axis in (1, 0) if shard[axis] == x.shape[axis]]
  if not whole:
    return x
  axis, number = whole[0], 1
  size = shard[0] * shard[1] * x.dtype.itemsize
  while size > number * most and shard[axis] % (2 * number) == 0:
    number *= 2
  if number == 1:
    return x
  if isinstance(x, jax.ShapeDtypeStruct):
    shape = list(x.shape)
    shape[axis] //= number
    return (x.update(shape=tuple(shape)),) * number
  pieces = _split(x, number, axis)
  x.delete()
  return pieces


@functools.partial(jax.jit, static_argnums=(1, 2))
def _split(x: Array, number: int, axis: int) -> Pieces:
  return tuple(jnp.split(x, number, axis))
