"""Cuts the large matrices of decoding weights into pieces, on some TPUs.

While a TPU computes, it can already copy the weights of later products into the
fast memory of the chip, so that these products need not wait. The compiler
copies whole arrays only, and there is room for few large arrays. Therefore,
each matrix above a limit is held as several arrays, its pieces.

A matrix is cut along its outputs: the columns of a kernel [in, out], or the
rows of an output matrix [V, D]. If the outputs are sharded over T devices, each
device cuts its own part, so that no weights move. A piece therefore has an axis
of size T in addition, [in, T, out / T / n] or [T, V / T / n, D] for n pieces.
"""

from collections.abc import Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

Array = jax.Array
Pieces = tuple[Array, ...]
# Kind of device -> the bytes of a matrix on such a device above which it is
# halved, and its halves again, as long as their outputs can be halved. Only
# chips of v5p cut. By the estimates of the compiler, v5e gains less in decoding
# than it loses in prefill, which joins the pieces of each matrix. With a limit
# of 32 MiB, a 7B model on v5p gains nothing, because its attention has matrices
# of 24.5 MiB.
MOST_BYTES: Mapping[str, int] = {'TPU v5': 24 << 20, 'TPU v5p': 24 << 20}


def cut(weights: Mapping[str, Any], mesh: jax.sharding.Mesh) -> Any:
  """Returns weights whose large matrices are cut, and deletes these matrices.

  Args:
    weights: arrays, or shapes with shardings, which `Publisher` returns. The
      kernels of linear layers are cut, and the output matrix 'lm_head'.
    mesh: the mesh of the weights.

  Returns:
    The weights, with a tuple of pieces in place of each matrix that was cut.
  """
  most = MOST_BYTES.get(mesh.devices.flat[0].device_kind)
  if most is None:
    return weights
  pieces = functools.partial(_pieces, mesh=mesh, most=most)

  def of_layer(path, x):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    # Only linear layers read pieces. Adapters and routers are read whole.
    linear = name.endswith('/kernel') and not name.endswith('/router/kernel')
    return pieces(x) if linear else x

  layers = jax.tree_util.tree_map_with_path(of_layer, weights['layers'])
  made = {**weights, 'layers': layers}
  if 'lm_head' in weights:
    made['lm_head'] = pieces(weights['lm_head'], axis=0)
  return made


def product(x_NI: Array, kernel: Array | Pieces, *, join: bool) -> Array:
  """Returns x @ kernel [N, O], in the dtype of x.

  Args:
    x_NI: N rows.
    kernel: a matrix [I, O], or its pieces.
    join: whether to join the pieces first. In prefill, a product takes longer
      than this copy, and one large product is faster than several small ones.
  """
  if not isinstance(kernel, tuple):
    return x_NI @ kernel.astype(x_NI.dtype)
  pieces = [piece.astype(x_NI.dtype) for piece in kernel]
  if join:
    joined = jnp.concatenate(pieces, axis=2)
    return x_NI @ joined.reshape(len(joined), -1)
  parts = [jnp.einsum('ni,ito->nto', x_NI, piece) for piece in pieces]
  return jnp.concatenate(parts, axis=2).reshape(len(x_NI), -1)


def logits(hidden_SD: Array, pieces: Pieces) -> Array:
  """Returns float32 logits [S, V].

  Args:
    hidden_SD: hidden states.
    pieces: the pieces of the output matrix [V, D].
  """
  parts = [
    jnp.einsum(
      'sd,tvd->stv',
      hidden_SD,
      piece.astype(hidden_SD.dtype),
      preferred_element_type=jnp.float32,
    )
    for piece in pieces
  ]
  return jnp.concatenate(parts, axis=2).reshape(len(hidden_SD), -1)


def _pieces(
  x: Any, *, mesh: jax.sharding.Mesh, most: int, axis: int = 1
) -> Any:
  """Returns the pieces of a large matrix, and other arrays as they are.

  Args:
    x: an array, or a shape with a sharding.
    mesh: the mesh of the weights.
    most: the bytes on a device above which a matrix is halved.
    axis: the axis of the outputs.
  """
  if x.ndim != 2:
    return x
  shard = x.sharding.shard_shape(x.shape)
  size = shard[0] * shard[1] * x.dtype.itemsize
  number = 1
  while size > number * most and shard[axis] % (2 * number) == 0:
    number *= 2
  if number == 1:
    return x
  devices = x.shape[axis] // shard[axis]
  sizes = devices, number, shard[axis] // number
  spec = () if x.sharding.is_fully_replicated else x.sharding.spec
  axes = [*spec, *[None] * (x.ndim - len(spec))]
  axes.insert(axis + 1, None)
  layout = NamedSharding(mesh, P(*axes))
  if isinstance(x, jax.ShapeDtypeStruct):
    shape = (*x.shape[:axis], sizes[0], sizes[2], *x.shape[axis + 1 :])
    return (jax.ShapeDtypeStruct(shape, x.dtype, sharding=layout),) * number
  pieces = _split(x, sizes, axis, layout)
  x.delete()
  return pieces


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _split(
  x: Array, sizes: tuple[int, int, int], axis: int, layout: NamedSharding
) -> Pieces:
  parted = x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])
  pieces = [jnp.take(parted, n, axis=axis + 1) for n in range(sizes[1])]
  return tuple(jax.lax.with_sharding_constraint(x, layout) for x in pieces)
