"""Measures the memory of devices and host, and moves arrays between them."""

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
# Weights are gathered to save communication only if arrays then fill at most
# this share of a device's memory, see `leaves_room`.
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
  """Returns the arrays moved to host memory, with the same shardings."""
  return _moved(tree, _HOST)


def on_devices(tree: Tree) -> Tree:
  """Returns the arrays moved to device memory, with the same shardings.

  Arrays that are in device memory already are kept.
  """
  return _moved(tree, _DEVICE)


def _moved(tree, kind):
  return jax.device_put(
    tree, jax.tree.map(lambda x: x.sharding.with_memory_kind(kind), tree)
  )


def max_memory() -> dict[str, float]:
  """Returns the largest memory used since the start of the process, in GiB.

  `perf/max_memory_host_gb` is the resident memory of this process.
  `perf/max_memory_allocated_gb` is the memory of arrays and programs on the
  fullest device of this process. This metric is absent if the devices do not
  report their memory, as on CPUs.
  """
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  # macOS counts bytes here, and other systems KiB.
  unit = 1 if sys.platform == 'darwin' else 1024
  metrics = {'perf/max_memory_host_gb': peak * unit / GIB}
  if peaks := _reported('peak_bytes_in_use'):
    metrics['perf/max_memory_allocated_gb'] = max(peaks) / GIB
  return metrics


class Held(NamedTuple):
  """Counts the bytes of a run's arrays on a device, without activations.

  Attributes:
    sizes: name of a kind of arrays -> the bytes of these arrays on a device
      that learns, while the device learns.
    collecting: name of a kind of arrays -> the bytes of these arrays on a
      device that collects, while the device collects; {} if no device of this
      host collects.
    gradients: the bytes of the gradients of an update.
    copied: the bytes of the keys and values that the decode program copies on a
      device that collects; 0 if a kernel reads the pages of the KV cache in
      place.
    gathered: the bytes of the frozen base of adapters on a device after an
      all-gather for updates; 0 without this all-gather.
  """

  sizes: Mapping[str, int]
  collecting: Mapping[str, int]
  gradients: int
  copied: int
  gathered: int = 0

  @property
  def learns(self) -> int:
    """The sum of `sizes`: bytes on a device that learns, without gradients."""
    return sum(self.sizes.values())

  @property
  def decodes(self) -> int:
    """The bytes on a device that collects, while it decodes."""
    return sum(self.collecting.values()) + self.copied

  @property
  def total(self) -> int:
    """The most bytes on a device: while it learns, or while it collects."""
    return max(self.learns + self.gradients + self.gathered, self.decodes)


def bytes_per_device(tree: Tree) -> int:
  """Returns the bytes on one device of a tree of sharded arrays or shapes."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


def device_limit() -> int | None:
  """Returns the bytes that programs may use on the smallest local device.

  The result is None if the devices report no limit, as on CPUs.
  """
  return min(_reported('bytes_limit'), default=None)


def leaves_room(mesh: jax.sharding.Mesh, size: int) -> bool:
  """Returns whether `size` bytes fill at most half of a device's memory.

  The result is True if the size of the memory is not known, as on CPUs.

  Args:
    mesh: the mesh of the devices, which may be devices of `topology`.
    size: the bytes that a device holds, without activations.
  """
  limits = topology.limits_of(mesh.devices.flat[0])
  limit = limits.memory * GIB if limits else device_limit()
  return limit is None or size <= _FILLED * limit


def _reported(name: str) -> list[int]:
  """Returns the statistic `name` of each local device that reports it."""
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  return [x[name] for x in stats if x.get(name)]


def gib(size: float) -> str:
  """Returns a number of bytes as text in GiB."""
  number = size / GIB
  return f'{number:.1f} GiB' if number >= 1 else f'{number:.2g} GiB'
