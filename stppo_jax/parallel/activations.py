"""Shards activations on the mesh.

If only parameters and batches had shardings, the compiler might move
activations between devices where moving the weights of a layer is cheaper. So
the model constrains the shardings of its activations. Rows of a batch are
sharded over `data`, `fsdp` and `expert`. Attention heads and the MLP's hidden
width are sharded over `tensor`.
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
  """Returns x with a sharding constraint, which the gradient of x has too.

  A dimension is replicated if the number of devices along its mesh axes does
  not divide its size, for example in a batch of one row on several devices.

  Args:
    x: an activation.
    mesh: the result of `make_mesh`; None: x is returned unchanged.
    *axes: the mesh axes of x's leading dimensions, one argument for each
      dimension; the remaining dimensions are replicated.
  """
  if mesh is None or mesh.size == 1:
    return x
  layout = NamedSharding(mesh, fitting(axes, x.shape, mesh))
  return jax.lax.with_sharding_constraint(x, layout)


def fitting(
  axes: Iterable[Axes], shape: tuple[int, ...], mesh: jax.sharding.Mesh
) -> P:
  """Returns a partition spec that fits an array of this shape.

  An entry of `axes` becomes None if the number of devices along its mesh axes
  does not divide the size of its dimension. `expert` is left out of an entry
  with several axes if only one device is along `expert`.

  Args:
    axes: the wanted mesh axes of the leading dimensions.
    shape: the shape of the array.
    mesh: the result of `make_mesh`.
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
  """Returns keys or values with their heads sharded over the axis `tensor`.

  If there are fewer heads than devices along `tensor`, several devices share a
  head, and each of these devices gets a copy of the head. Without copies, the
  heads would be replicated, and every device would compute the attention of all
  query heads. The gradients of the copies are summed once, after attention.

  Args:
    x_BLKH: keys or values of B rows, L tokens and K heads of size H.
    num_heads: the number of query heads.
    mesh: the result of `make_mesh`; None: one device.
  """
  if mesh is None or mesh.size == 1:
    return x_BLKH
  heads = math.lcm(x_BLKH.shape[2], extent(mesh, TENSOR))
  # Every copy of a head must serve the same number of query heads.
  if num_heads % heads == 0:
    x_BLKH = jnp.repeat(x_BLKH, heads // x_BLKH.shape[2], axis=2)
  return constrain(x_BLKH, mesh, ROWS, None, TENSOR)


def extent(mesh: jax.sharding.Mesh, axes: Axes) -> int:
  """Returns the number of devices along one or several axes."""
  return math.prod(mesh.shape[name] for name in names(axes))


def names(axes: Axes) -> tuple[str, ...]:
  """Returns the names of axes as a tuple; `axes` may be one name or None."""
  return (axes,) if isinstance(axes, str) else axes or ()
