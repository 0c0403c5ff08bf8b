"""Where the seconds of a step go, and tokens per second."""

from collections.abc import Mapping
import time

from stppo_jax import batch as batch_lib

_PHASES = ('wait', 'annotate', 'update')


class Timer:
  """Seconds since the last lap, by name.

  Attributes:
    laps: `timing_s/{name}` to seconds.
  """

  def __init__(self):
    self._last = time.monotonic()
    self.laps = {}

  def lap(self, name: str) -> None:
    now = time.monotonic()
    self.laps[f'timing_s/{name}'] = now - self._last
    self._last = now


def speed(
  packed: batch_lib.TokenBatch,
  metrics: Mapping[str, float],
  *,
  num_epochs: int,
) -> dict[str, float]:
  """Tokens per second: of the step, of writing, of updating.

  Args:
    packed: the step's batch.
    metrics: with the seconds of collecting and of the phases of the step.
    num_epochs: passes over the batch.
  """
  tokens = float(packed.lengths_B.sum())
  written = float((packed.turn_ids_BL > 0).sum())
  return {
    'perf/throughput': tokens / sum(metrics[f'timing_s/{p}'] for p in _PHASES),
    'perf/collect_tokens_per_second': written / metrics['timing_s/collect'],
    'perf/update_tokens_per_second': (
      tokens * num_epochs / metrics['timing_s/update']
    ),
  }
