"""How long the phases of a step take, and how fast they are."""

import time


class Timer:
  """Seconds since the last lap, by name."""

  def __init__(self):
    self._start = self._last = time.monotonic()
    self._laps = {}

  def lap(self, name: str) -> None:
    now = time.monotonic()
    self._laps[name] = now - self._last
    self._last = now

  def metrics(self) -> dict[str, float]:
    whole = {'timing_s/step': time.monotonic() - self._start}
    return whole | {f'timing_s/{k}': v for k, v in self._laps.items()}


def speed(packed, metrics, num_epochs: int) -> dict[str, float]:
  """Tokens per second: of the step, of writing, of updating."""
  tokens = float(packed.lengths_B.sum())
  written = float((packed.turn_ids_BL > 0).sum())
  phases = ('collect', 'annotate', 'update')
  return {
    'perf/throughput': tokens / sum(metrics[f'timing_s/{p}'] for p in phases),
    'perf/collect_tokens_per_second': written / metrics['timing_s/collect'],
    'perf/update_tokens_per_second': (
      tokens * num_epochs / metrics['timing_s/update']
    ),
  }
