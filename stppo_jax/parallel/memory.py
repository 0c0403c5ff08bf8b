"""Moves arrays to the host's memory while the devices do not need them."""

from typing import Any

import jax

Tree = Any

_HOST, _DEVICE = 'pinned_host', 'device'


def check_host(mesh: jax.sharding.Mesh) -> None:
  """Raises ValueError if the devices cannot read the host's memory."""
  device = mesh.local_devices[0]
  kinds = [memory.kind for memory in device.addressable_memories()]
  if _HOST not in kinds:
    raise ValueError(
      f'{device.platform} devices reach no memory of kind {_HOST}; they reach '
      + ', '.join(kinds)
    )


def on_host(tree: Tree) -> Tree:
  """Returns the arrays in host memory with the same shardings."""
  return _moved(tree, _HOST)


def on_devices(tree: Tree) -> Tree:
  """Returns the arrays in device memory; those already there are kept."""
  return _moved(tree, _DEVICE)


def _moved(tree, kind):
  return jax.device_put(
    tree, jax.tree.map(lambda x: x.sharding.with_memory_kind(kind), tree)
  )
