"""Reads and replaces rows of arrays that are sharded over devices.

n devices hold b rows each. `select` exchanges rows: each device gets m of the
selected ones. The other functions read or replace, for an index [n, m], m rows
within the part of each device, and nothing is sent. For a number of a row that
is too large, `take_clipped` returns any row, `take_filled` and
`take_with_inverse` return zeros, and `put` does nothing.
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
  """Returns some rows of a batch, laid out like the batch.

  For x[rows], every device would get the whole batch and keep a few of its
  rows. Here every device gets one row in each of m rounds. In a round, every
  device sends one of its rows to each of the others: the row with the local
  index that the receiver asks for. The receiver keeps only what the owner of
  its row has sent. So a device holds n rows at a time besides its own.

  Args:
    batch: arrays [n b, ...], sharded over the axes data and fsdp.
    rows: int32 [n m], indices of rows.
    mesh: the mesh that the batch is laid out on; None: one device.
  """
  axes = mesh_lib.BATCH_AXES
  num_devices = 1 if mesh is None else activations.extent(mesh, axes)
  if mesh is None or num_devices == 1:
    return jax.tree.map(lambda x: x[rows], batch)

  def local(batch, rows_nm):
    size = len(jax.tree.leaves(batch)[0])  # b

    def one_row(_, rows_n):
      """Returns the next row of this device; rows_n: the next of all."""
      owner = rows_n[jax.lax.axis_index(axes)] // size

      def exchange(x):
        got = jax.lax.all_to_all(x[rows_n % size], axes, 0, 0, tiled=True)
        return got[owner]

      return None, jax.tree.map(exchange, batch)

    # All devices of a CPU run the collectives of a program in the same order,
    # but not collectives in a loop relative to those outside: devices would
    # wait for each other for ever. Without a loop there is one order.
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
  """Returns rows of an array.

  Args:
    x: [n b, ...].
    index: int32 [A], numbers of rows; or int32 [n, m], for each device numbers
      of rows within its own part, so that no row moves to another device. For a
      number that is too large, any row is returned.
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
    x, index: see `take_clipped`; a number that is too large is ignored.
    new: the new rows, in the order of the index.
    mesh: the mesh that rows are laid out on, over the axes data and fsdp.
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
  # The compiler would exchange rows between devices, and on some meshes it does
  # not drop numbers that are too large.
  rows = P(mesh_lib.BATCH_AXES)
  return jax.shard_map(
    local, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False
  )(x, index, new)


def take_filled(x: Array, index: Array) -> Array:
  """Returns for each device x[index]; 0 for a number that is too large.

  Args:
    x: [n, b, ...].
    index: int32 [n, m].
  """
  take = lambda x, index: x.at[index].get(mode='fill', fill_value=0)
  return jax.vmap(take)(x, index)


# JAX does not know that `inverse` undoes `index`: its derivative of x[index]
# would be a scatter-add, which adds one row after the other.
@jax.custom_vjp
def take_with_inverse(x: Array, index: Array, inverse: Array) -> Array:
  """Returns `take_filled(x, index)`, whose gradient also takes rows.

  Args:
    x: [n, b, ...].
    index: int32 [n, m]. It takes no row of a device twice.
    inverse: int32 [n, b], for each row the place i with index[i] = row; too
      large for a row that is not taken. Otherwise the gradient is wrong.
  """
  del inverse  # only the gradient needs it
  return take_filled(x, index)


take_with_inverse.defvjp(
  lambda x, index, inverse: (take_filled(x, index), inverse),
  lambda inverse, gradient: (take_filled(gradient, inverse), None, None),
)
