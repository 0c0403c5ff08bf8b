"""Moves arrays to host memory, and measures the memory that is used."""

import resource
import sys
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


_GIB = 1 << 30


def max_memory() -> dict[str, float]:
  """Returns the largest memory used since the start of the process, in GiB.

  `perf/max_memory_host_gb` is the resident memory of this process, and
  `perf/max_memory_allocated_gb` that of arrays and programs on the fullest of
  its devices; the latter is absent where the devices do not report it (CPU).
  """
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  unit = 1 if sys.platform == 'darwin' else 1024
  metrics = {'perf/max_memory_host_gb': peak * unit / _GIB}
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  peaks = [x['peak_bytes_in_use'] for x in stats if 'peak_bytes_in_use' in x]
  if peaks:
    metrics['perf/max_memory_allocated_gb'] = max(peaks) / _GIB
  return metrics
