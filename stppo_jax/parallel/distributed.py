"""Between this host's arrays and global ones."""

from typing import Any

import jax

Tree = Any


def from_local_rows(tree: Tree, sharding: jax.sharding.NamedSharding) -> Tree:
  """Global arrays from the rows that each process holds.

  Args:
    tree: numpy arrays; the processes' rows follow one another.
    sharding: of the rows.
  """
  return jax.tree.map(
    lambda x: jax.make_array_from_process_local_data(sharding, x), tree
  )
