"""Makes global arrays of the rows that each host holds."""

from typing import Any

import jax

Tree = Any


def from_local_rows(tree: Tree, sharding: jax.sharding.NamedSharding) -> Tree:
  """Returns global arrays made of the rows that each process holds.

  Args:
    tree: numpy arrays with this process's rows. In the global arrays the rows
      of the processes follow one another.
    sharding: sharding of the global arrays.
  """
  return jax.tree.map(
    lambda x: jax.make_array_from_process_local_data(sharding, x), tree
  )
