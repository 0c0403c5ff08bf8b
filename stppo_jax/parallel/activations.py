"""Shards activations on the mesh.

The shardings of parameters and rows alone leave the compiler a choice, and it
may choose to move activations where moving a layer's weights is cheaper. So the
model constrains its activations: rows are sharded over `data`, `fsdp` and
`expert`, heads and the MLP's hidden width over `tensor`.
"""

from collections.abc import Iterable
import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from stppo_jax.parallel import mesh as mesh_lib

Array = jax.Array
Axes = str | tuple[str, ...] | None

ROWS = mesh_lib.BATCH_AXES
TENSOR = mesh_lib.AXES[-1]


def constrain(x: Array, mesh: jax.sharding.Mesh | None, *axes: Axes) -> Array:
  """Returns x with its sharding constrained; its gradient is sharded alike.

  A dimension that its mesh axes do not divide is replicated: for example a
  single row, or key and value heads that several devices share.

  Args:
    x: an activation.
    mesh: the result of `make_mesh`; None: x is returned as it is.
    *axes: mesh axes of the leading dimensions; the others are replicated.
  """
  if mesh is None or mesh.size == 1:
    return x
  layout = NamedSharding(mesh, fitting(axes, x.shape, mesh))
  return jax.lax.with_sharding_constraint(x, layout)


def fitting(
  axes: Iterable[Axes], shape: tuple[int, ...], mesh: jax.sharding.Mesh
) -> P:
  """Returns mesh axes of dimensions without those that do not divide them.

  Where a dimension has several axes, `expert` is left out if it has one device.
  """

  def one(axes: Axes, size: int) -> Axes:
    if axes is None or size % extent(mesh, axes):
      return None
    if isinstance(axes, str):
      return axes
    alone = mesh.shape['expert'] == 1
    several = [x for x in axes if x != 'expert' or not alone]
    return tuple(several) if len(several) > 1 else several[0]

  return P(*map(one, axes, shape))


def spread_heads(
  x_BLKH: Array, num_heads: int, mesh: jax.sharding.Mesh | None
) -> Array:
  """Returns keys or values in which every device has heads of its own.

  Where several devices of the axis `tensor` share a head, each gets a copy of
  it. Without copies the heads would be replicated, and every device would
  compute the attention of all query heads. The gradients of the copies are
  summed between the devices once, after attention.

  Args:
    x_BLKH: keys or values.
    num_heads: N, query heads.
    mesh: the result of `make_mesh`; None: one device.
  """
  if mesh is None or mesh.size == 1:
    return x_BLKH
  heads = math.lcm(x_BLKH.shape[2], extent(mesh, TENSOR))
  # Every copy must serve as many query heads as any other.
  if num_heads % heads == 0:
    x_BLKH = jnp.repeat(x_BLKH, heads // x_BLKH.shape[2], axis=2)
  return constrain(x_BLKH, mesh, ROWS, None, TENSOR)


def extent(mesh: jax.sharding.Mesh, axes: Axes) -> int:
  """Returns the number of devices along one or several axes."""
  return math.prod(mesh.shape[name] for name in names(axes))


def names(axes: Axes) -> tuple[str, ...]:
  """Returns the names of one or several axes."""
  return (axes,) if isinstance(axes, str) else axes or ()
