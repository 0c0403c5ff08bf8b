"""The progress display: a live bar on a terminal, a line per step elsewhere.

step 12/100  reward 0.534  val/em 0.610  2,345 tokens/s  eta 0:12:30
"""

from collections.abc import Callable
from collections.abc import Mapping
import datetime
import time

import rich.console
import rich.progress
import rich.text

# The metrics that a line shows.
_REWARD = 'critic/score/mean'
_EVALUATION = 'val/'  # then the name of the score, then of the data set
_THROUGHPUT = 'perf/throughput'
_SKIPPED = 'update/skipped'


class Progress:
  """Shows each step; a metric that a step lacks keeps its last value."""

  def __init__(
    self,
    num_steps: int,
    *,
    console: rich.console.Console | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts the clock.

    Args:
      num_steps: the length of the run.
      console: where to print; shows the bar if it is a terminal.
      clock: returns seconds, for the time that remains.
    """
    self._num_steps = num_steps
    self._console = console or rich.console.Console(highlight=False)
    self._clock = clock
    self._start = clock()
    # The steps that were done before this start, because a run can be resumed.
    self._first = None
    self._shown = {}
    self._score_name = ''
    self._bar = None
    if self._console.is_terminal:
      self._bar = rich.progress.Progress(
        rich.progress.BarColumn(bar_width=None),
        rich.progress.TextColumn('{task.description}', markup=False),
        console=self._console,
        expand=True,
      )
      self._task = self._bar.add_task('starting', total=num_steps)
      self._bar.start()

  def update(self, done: int, metrics: Mapping[str, float]) -> None:
    """Shows that `done` steps are done; 0 = only the start is evaluated."""
    line = self._line(done, metrics)
    if self._bar is not None:
      self._bar.update(self._task, completed=done, description=line)
    else:
      self._console.print(line, soft_wrap=True)

  def show(self, text: str) -> None:
    """Prints text above the bar, with the colours that it has."""
    self._console.print(rich.text.Text.from_ansi(text), soft_wrap=True)

  def close(self) -> None:
    """Ends the bar."""
    if self._bar is not None:
      self._bar.stop()

  def _line(self, done, metrics):
    scores = {k: v for k, v in metrics.items() if k.startswith(_EVALUATION)}
    if scores:
      # The mean over data sets, as val/{score}.
      self._score_name = '/'.join(next(iter(scores)).split('/')[:2])
      self._shown['score'] = sum(scores.values()) / len(scores)
    for name, key in (('reward', _REWARD), ('speed', _THROUGHPUT)):
      if key in metrics:
        self._shown[name] = metrics[key]
    words = [f'step {done}/{self._num_steps}']
    for key, name in (('reward', 'reward'), ('score', self._score_name)):
      if key in self._shown:
        words.append(f'{name} {self._shown[key]:.3f}')
    if metrics.get(_SKIPPED, 0) > 0:
      words.append(f'skipped {metrics[_SKIPPED]:.0%} of the updates')
    if 'speed' in self._shown:
      words.append(f'{self._shown["speed"]:,.0f} tokens/s')
    if self._first is None:
      self._first = max(done - 1, 0)
    if done > self._first:
      words.append(f'eta {self._eta(done)}')
    return '  '.join(words)

  def _eta(self, done):
    """Returns the remaining h:mm:ss, by the mean pace since this start."""
    pace = (self._clock() - self._start) / (done - self._first)
    seconds = pace * max(self._num_steps - done, 0)
    return str(datetime.timedelta(seconds=round(seconds)))
