"""The largest memory that a process has used."""

import resource
import sys

import jax

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
