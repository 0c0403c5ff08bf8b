"""Accounts for the time of a run, over all of its starts.

Goodput is the share of the wall time since a run's first start in which it made
steps that were kept. The rest is starting, saving, waiting to be started again,
and steps that were lost and made again. What has to outlive a start is in the
heartbeat and in metrics.jsonl.
"""

from collections.abc import Callable, Mapping
import json
import pathlib
import time

from stppo_jax.workdir import heartbeat

# Metrics of a line: the seconds of all phases of a step, and those of the save
# before it.
_STEP, _SAVE = 'timing_s/step', 'timing_s/checkpoint'


class Goodput:
  """Accounts for the seconds of a run, line by line of its metrics.

  Args:
    beat: the heartbeat of the run, which knows its first start and what was
      lost by others.
    productive: seconds of the steps that were kept until this start.
    origin: 1 to 4, where this start has its weights from, see
      `training.starts`.
    clock: returns seconds since any moment.
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
    """Returns the metrics of a line that is written now.

    Args:
      metrics: the other metrics of the line.
    """
    now = self._clock()
    total, self._since = now - self._since, now
    step = metrics.get(_STEP, 0.0)
    self._productive += step
    # A clock that was set back must not make more than 100%.
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
  """Reads a file of metrics, which may be missing or end within a line.

  Args:
    path: the file.
    step: the last step that is kept.

  Returns:
    The duration of all steps that are kept, with those whose lines
    `writer.keep_lines` has removed, and the last step that was written, kept or
    not.
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
        # The newest line has the total, also of lines that are not kept.
        seconds = record['goodput/fraction'] * record['goodput/wall_s']
    except (ValueError, KeyError, TypeError, RecursionError):
      continue
  return seconds, last
