"""Arrays in the memory of the host, while devices do without them."""

from typing import Any

import jax

Tree = Any

_HOST, _DEVICE = 'pinned_host', 'device'


def check_host(mesh: jax.sharding.Mesh) -> None:
  """Whether programs of these devices can be given arrays of the host.

  Raises:
    ValueError: they cannot; the kinds of memory there are.
  """
  device = mesh.local_devices[0]
  kinds = [memory.kind for memory in device.addressable_memories()]
  if _HOST not in kinds:
    raise ValueError(
      f'{device.platform} devices reach no memory of kind {_HOST}; they reach '
      + ', '.join(kinds)
    )


def on_host(tree: Tree) -> Tree:
  """The arrays in host memory, cut as they are; see `check_host`."""
  return _moved(tree, _HOST)


def on_devices(tree: Tree) -> Tree:
  """Copies for a while of arrays in host memory; others are given back."""
  return _moved(tree, _DEVICE)


def _moved(tree, kind):
  return jax.device_put(
    tree, jax.tree.map(lambda x: x.sharding.with_memory_kind(kind), tree)
  )
