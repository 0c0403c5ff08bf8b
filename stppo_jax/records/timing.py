"""The seconds of a step by phase, and its tokens per second."""

from collections.abc import Mapping
import time


class Timer:
  """Measures the seconds between laps.

  Attributes:
    laps: seconds by `timing_s/{name}`.
  """

  def __init__(self):
    self._last = time.monotonic()
    self.laps: dict[str, float] = {}

  def lap(self, name: str) -> None:
    """Records the seconds since the last lap, or since the start."""
    now = time.monotonic()
    self.laps[f'timing_s/{name}'] = now - self._last
    self._last = now


def step_metrics(
  laps: Mapping[str, float],
  *,
  tokens: float,
  sampled: float,
  collect_seconds: float,
  save_seconds: float,
  num_epochs: int,
) -> dict[str, float]:
  """Returns the seconds of a step's phases and its tokens per second.

  Args:
    laps: the seconds of waiting for the collection, annotating and updating,
      by the names of `Timer`.
    tokens: the tokens of the step's batch.
    sampled: tokens of it that the policy wrote.
    collect_seconds: the duration of the collection; longer than the wait for it
      if it was made ahead.
    save_seconds: the duration of the save after the last step, whose own line
      was written before the save.
    num_epochs: the number of passes over the batch.
  """
  seconds = sum(laps.values())
  return {
    **laps,
    'timing_s/collect': collect_seconds,
    'timing_s/step': seconds,
    'perf/throughput': tokens / seconds,
    'perf/collect_tokens_per_second': sampled / collect_seconds,
    'perf/update_tokens_per_second': (
      tokens * num_epochs / laps['timing_s/update']
    ),
    'timing_s/checkpoint': save_seconds,
  }
