"""Reads and replaces rows of arrays that are sharded over devices.

n devices hold b rows each. `select` sends rows between devices: each device
gets m of the selected rows. The other functions take an index [n, m], and read
or replace m rows within each device's own part, so no row is sent. If the
index of a row is too large, `take_clipped` returns an arbitrary row,
`take_filled` and `take_with_inverse` return zeros, and `put` does nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from stppo_jax.parallel import activations
from stppo_jax.parallel import mesh as mesh_lib

Array = jax.Array
Tree = Any


def select(batch: Tree, rows: Any, mesh: jax.sharding.Mesh | None) -> Tree:
  """Returns some rows of a batch, with the sharding of the batch.

  With x[rows], every device would get the whole batch and keep a few of its
  rows. Here every device gets one row in each of m rounds. Say that in a round,
  device d needs row i of the batch, which is row i mod b of the device that
  owns it. Then every device sends its own row i mod b to d, and d keeps only
  the row from the owner. So in addition to its own rows, a device holds only n
  rows at a time.

  Args:
    batch: arrays [n b, ...], with rows sharded over `mesh_lib.BATCH_AXES`.
    rows: int32 [n m], indices of rows in the batch; the first m are for the
      first device, and so on.
    mesh: the mesh of the batch; None: one device.
  """
  axes = mesh_lib.BATCH_AXES
  num_devices = 1 if mesh is None else activations.extent(mesh, axes)
  if mesh is None or num_devices == 1:
    return jax.tree.map(lambda x: x[rows], batch)

  def local(batch, rows_nm):
    size = len(jax.tree.leaves(batch)[0])  # b, the number of rows on a device

    def one_row(_, rows_n):
      """Returns the row that this device gets in a round.

      `rows_n` are the indices of the rows that the n devices need.
      """
      owner = rows_n[jax.lax.axis_index(axes)] // size

      def exchange(x):
        got = jax.lax.all_to_all(x[rows_n % size], axes, 0, 0, tiled=True)
        return got[owner]

      return None, jax.tree.map(exchange, batch)

    # On a CPU, devices may run a collective in a loop and a collective outside
    # of it in different orders, and would then wait for each other for ever.
    # All devices run collectives outside of loops in the same order, so the
    # loop is unrolled.
    unroll = mesh_lib.platform(mesh) == 'cpu'
    return jax.lax.scan(one_row, None, rows_nm.T, unroll=unroll)[1]

  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(P(axes), P()),
    out_specs=P(axes),
    check_vma=False,
  )(batch, rows.reshape(num_devices, -1))


def take_clipped(x: Array, index: Array) -> Array:
  """Returns rows of an array by their indices.

  Args:
    x: the array [n b, ...].
    index: int32 [A], the indices of rows of x. Or int32 [n, m], for each of n
      devices the indices of rows within its own b rows, so that no row moves to
      another device. An index that is too large gives an arbitrary row.
  """
  if index.ndim == 1:
    return x.at[index].get(mode='clip')
  parts = x.reshape(len(index), -1, *x.shape[1:])
  taken = jax.vmap(lambda part, m: part.at[m].get(mode='clip'))(parts, index)
  return taken.reshape(-1, *x.shape[1:])


def put(
  x: Array, index: Array, new: Array, mesh: jax.sharding.Mesh | None
) -> Array:
  """Returns an array with some rows replaced; devices exchange nothing.

  Args:
    x, index: see `take_clipped`; an index that is too large is ignored.
    new: the new rows, in the order of the index.
    mesh: the mesh over whose `mesh_lib.BATCH_AXES` rows are sharded; None: one
      device.
  """

  def local(x, index, new):
    size = len(x) // len(index)
    part = jnp.arange(len(index))[:, None]
    index = jnp.where(index < size, part * size + index, len(x)).reshape(-1)
    return x.at[index].set(new, mode='drop')

  if index.ndim == 1:
    return x.at[index].set(new, mode='drop')
  if mesh is None or mesh.size == 1:
    return local(x, index, new)
  # Without `shard_map`, the compiler would exchange rows between devices, and
  # on some meshes it would not drop indices that are too large.
  rows = P(mesh_lib.BATCH_AXES)
  return jax.shard_map(
    local, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False
  )(x, index, new)


def take_filled(x: Array, index: Array) -> Array:
  """Returns x[index] for each device; zeros for an index that is too large.

  Args:
    x: the array [n, b, ...], which has the rows of each device.
    index: int32 [n, m], indices of rows within each device's part.
  """
  take = lambda x, index: x.at[index].get(mode='fill', fill_value=0)
  return jax.vmap(take)(x, index)


# JAX does not know that `inverse` undoes `index`: its derivative of x[index]
# would be a scatter-add, which adds one row after the other.
@jax.custom_vjp
def take_with_inverse(x: Array, index: Array, inverse: Array) -> Array:
  """Returns `take_filled(x, index)`; its gradient takes rows by `inverse`.

  Args:
    x: see `take_filled`.
    index: see `take_filled`; no row of a device may occur twice.
    inverse: int32 [n, b], for each row of a device the position of the row in
      the device's `index`, and m or more for a row that is not in `index`. With
      any other `inverse`, the gradient is wrong.
  """
  del inverse  # only the gradient uses `inverse`
  return take_filled(x, index)


take_with_inverse.defvjp(
  lambda x, index, inverse: (take_filled(x, index), inverse),
  lambda inverse, gradient: (take_filled(gradient, inverse), None, None),
)
