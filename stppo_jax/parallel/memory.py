"""Tells what devices and the host hold in memory, and moves arrays there."""

from collections.abc import Mapping
import math
import resource
import sys
from typing import Any, NamedTuple

import jax

from stppo_jax.parallel import topology

Tree = Any

GIB = 1 << 30

_HOST, _DEVICE = 'pinned_host', 'device'
# The share of a device's memory that weights may fill to save communication.
_FILLED = 1 / 2


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


def max_memory() -> dict[str, float]:
  """Returns the largest memory used since the start of the process, in GiB.

  `perf/max_memory_host_gb` is the resident memory of this process, and
  `perf/max_memory_allocated_gb` that of arrays and programs on the fullest of
  its devices; the latter is absent where the devices do not report it (CPU).
  """
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  # macOS counts bytes here, and other systems KiB.
  unit = 1 if sys.platform == 'darwin' else 1024
  metrics = {'perf/max_memory_host_gb': peak * unit / GIB}
  if peaks := _reported('peak_bytes_in_use'):
    metrics['perf/max_memory_allocated_gb'] = max(peaks) / GIB
  return metrics


class Held(NamedTuple):
  """Counts the bytes that a run holds on a device, beside what programs need.

  Attributes:
    sizes: name to bytes of everything on a device that learns, while it does.
    collecting: name to bytes of everything on a device that collects, while it
      does; {} if none does.
    gradients: bytes of the gradients of an update.
    copied: bytes of keys and values that decode copies on a device that
      collects; 0 if a kernel reads them in place.
    gathered: bytes of a frozen base that an update has gathered.
  """

  sizes: Mapping[str, int]
  collecting: Mapping[str, int]
  gradients: int
  copied: int
  gathered: int = 0

  @property
  def learns(self) -> int:
    """The bytes on a device that learns, without gradients."""
    return sum(self.sizes.values())

  @property
  def decodes(self) -> int:
    """The bytes on a device that collects."""
    return sum(self.collecting.values()) + self.copied

  @property
  def total(self) -> int:
    """The bytes on the device that holds most."""
    return max(self.learns + self.gradients + self.gathered, self.decodes)


def bytes_per_device(tree: Tree) -> int:
  """Returns the bytes on one device of a tree of shapes with layouts."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


def device_limit() -> int | None:
  """Returns the bytes that programs may use of the smallest local device.

  None if the devices do not report it; CPUs do not.
  """
  return min(_reported('bytes_limit'), default=None)


def leaves_room(mesh: jax.sharding.Mesh, size: int) -> bool:
  """Returns whether a device has enough room left beside what it holds.

  This is true where the size of the memory is not known, as for CPUs.

  Args:
    mesh: the mesh of the devices, which need not be there.
    size: the bytes that a device holds, but for activations.
  """
  limits = topology.limits_of(mesh.devices.flat[0])
  limit = limits.memory * GIB if limits else device_limit()
  return limit is None or size <= _FILLED * limit


def _reported(name: str) -> list[int]:
  """Returns a statistic of the local devices that report it."""
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  return [x[name] for x in stats if x.get(name)]


def gib(size: float) -> str:
  """Returns bytes in GiB, as text."""
  number = size / GIB
  return f'{number:.1f} GiB' if number >= 1 else f'{number:.2g} GiB'
