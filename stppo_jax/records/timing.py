"""The seconds of a step by phase, and its tokens per second."""

from collections.abc import Callable
from collections.abc import Mapping
import time


class Timer:
  """Measures the seconds of phases that follow one another.

  Attributes:
    laps: seconds by `timing_s/{phase}`.
  """

  def __init__(
    self, phase: str, on_phase: Callable[[str], None] = lambda phase: None
  ):
    """Begins the first phase.

    Args:
      phase: its name.
      on_phase: called with the name of each phase that begins, and with '' at
        the end of the last one.
    """
    self._on_phase = on_phase
    self._phase = ''
    self.laps: dict[str, float] = {}
    self.begin(phase)

  def begin(self, phase: str) -> None:
    """Ends the phase before and begins another."""
    now = time.monotonic()
    if self._phase:
      self.laps[f'timing_s/{self._phase}'] = now - self._since
    self._phase, self._since = phase, now
    self._on_phase(phase)

  def end(self) -> dict[str, float]:
    """Ends the last phase; returns the seconds of all."""
    self.begin('')
    return self.laps


def step_metrics(
  laps: Mapping[str, float],
  *,
  tokens: float,
  sampled: float,
  collect_seconds: float,
  save_seconds: float,
  num_epochs: float,
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
