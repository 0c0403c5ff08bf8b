"""Accounts for the time of a run, over all of its starts.

Goodput is the share of the wall time since a run's first start that was spent
on steps which were kept. The rest of the time is spent on starting, on saving,
on waiting for the next start, and on steps that were lost and repeated. The
values that a later start needs are in the heartbeat and in metrics.jsonl.
"""

from collections.abc import Callable, Mapping
import json
import pathlib
import time

from stppo_jax.workdir import heartbeat

# Two metrics of a step's line: the seconds of all phases of the step, and the
# seconds of the previous step's save.
_STEP, _SAVE = 'timing_s/step', 'timing_s/checkpoint'


class Goodput:
  """Adds up the time of a run, whenever a line of its metrics is written.

  Args:
    beat: the heartbeat of the run, which has the time of the first start, and
      counts restarts and lost steps.
    productive: the total duration, in seconds, of the steps that earlier starts
      have done and that were kept.
    origin: the source of this start's weights, 1 to 4, see `training.starts`.
    clock: returns seconds since an arbitrary moment.
    now: returns seconds since 1970.
  """

  def __init__(
    self,
    *,
    beat: heartbeat.Beat,
    productive: float,
    origin: int,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], float] = time.time,
  ):
    self._beat, self._productive, self._origin = beat, productive, origin
    self._clock, self._now = clock, now
    self._since = clock()

  def measure(self, metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the time metrics of the line that is about to be written.

    Args:
      metrics: the other metrics of the line.
    """
    now = self._clock()
    total, self._since = now - self._since, now
    step = metrics.get(_STEP, 0.0)
    self._productive += step
    # The maximum keeps the fraction from exceeding 1 if the clock of the
    # machine was set back.
    wall = max(self._now() - self._beat.began, self._productive)
    return {
      'timing_s/total': total,
      'timing_s/other': max(total - step - metrics.get(_SAVE, 0.0), 0.0),
      'goodput/fraction': self._productive / wall if wall else 1.0,
      'goodput/wall_s': wall,
      'goodput/restarts': float(self._beat.restarts),
      'goodput/lost_steps': float(self._beat.lost_steps),
      'goodput/origin': float(self._origin),
    }


def read(path: pathlib.Path, step: int) -> tuple[float, int]:
  """Reads the time of kept steps, and the last step, from metrics.jsonl.

  Args:
    path: the file, which may be missing or end within a line.
    step: the last step that is kept.

  Returns:
    The total duration of all steps that are kept, in seconds, and the last step
    that has a line, kept or not. The duration includes steps whose lines
    `writer.keep_lines` has removed.
  """
  seconds, last = 0.0, 0
  try:
    lines = path.read_bytes().splitlines()
  except OSError:
    lines = []
  for line in lines:
    try:
      record = json.loads(line)
      last = max(last, record['step'])
      if 0 < record['step'] <= step:
        # A line has the total time up to its step, so the newest line counts.
        seconds = record['goodput/fraction'] * record['goodput/wall_s']
    except (ValueError, KeyError, TypeError, RecursionError):
      continue
  return seconds, last
