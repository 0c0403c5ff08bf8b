"""The progress display: a live bar on a terminal, a line per step elsewhere.

step 12/100  reward 0.534  val/em 0.610  entropy 1.204  kl 0.013  clipped 0.021
turns 2.375  2,345 tokens/s  eta 0:12:30   (one line)

The bar also shows the phase of the step that is in progress.
"""

from collections.abc import Callable, Mapping
import datetime
import errno
import logging
import os
import time

import rich.console
import rich.progress
import rich.text

from stppo_jax import streams
from stppo_jax.records import headline

_log = logging.getLogger(__name__)
# The metrics that a line shows in addition to reward, scores and speed.
_NAMES = {
  'entropy': 'actor/entropy',
  'kl': 'critic/kl',
  'clipped': 'actor/pg_clipfrac',
  'turns': 'num_turns/mean',
}
_THROUGHPUT = 'perf/throughput'
_SKIPPED = 'update/skipped'


class _Console(rich.console.Console):
  """A console whose `print` raises an error if the output pipe is closed.

  The console of rich would end the process instead.
  """

  def on_broken_pipe(self) -> None:
    raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class Progress:
  """Shows each step, with the metrics that were measured in it.

  If the console can no longer be written, for example because its pipe is
  closed, the display stops printing, and the run goes on.
  """

  def __init__(
    self,
    num_steps: int,
    *,
    every: int = 1,
    console: rich.console.Console | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts the display.

    Args:
      num_steps: the number of steps of the run.
      every: the number of steps between two lines, if there is no bar.
      console: the console to print to. If it is a terminal, it shows the bar.
      clock: returns a time in seconds, from which the remaining time is
        estimated.
    """
    self._num_steps, self._every = num_steps, every
    self._console = console or _Console(highlight=False)
    self._clock = clock
    # The first step of this start, and the time of its end. The first step
    # compiles, so the pace is measured over the later steps.
    self._first: tuple[int, float] | None = None
    self._bar = None
    if self._console.is_terminal:
      self._bar = rich.progress.Progress(
        rich.progress.BarColumn(bar_width=None),
        rich.progress.TextColumn('{task.fields[phase]}', markup=False),
        rich.progress.TextColumn('{task.description}', markup=False),
        console=self._console,
        expand=True,
      )
      self._task = self._bar.add_task('starting', total=num_steps, phase='')
      self._bar.start()

  def update(self, done: int, metrics: Mapping[str, float]) -> None:
    """Shows that `done` steps are done; 0 is the evaluation before training."""
    line = self._line(done, metrics)
    if self._bar is not None:
      self._bar.update(self._task, completed=done, description=line)
    elif done % self._every == 0 or done == self._num_steps:
      self._print(line)

  def enter_phase(self, phase: str) -> None:
    """Shows in the bar which phase the run enters; '' changes nothing."""
    if self._bar is not None and phase:
      self._bar.update(self._task, phase=phase)

  def show(self, text: str) -> None:
    """Prints text above the bar with the ANSI colours of the text."""
    self._print(rich.text.Text.from_ansi(text))

  def close(self) -> None:
    """Ends the bar."""
    if self._bar is not None:
      self._bar.stop()

  def _print(self, text: str | rich.text.Text) -> None:
    try:
      self._console.print(text, soft_wrap=True)
    except OSError as error:
      # If the stream were not silenced, the interpreter would fail when it
      # flushes the stream at the end of the process.
      streams.silence(self._console.file)
      reason = error.strerror
      _log.warning('cannot print any more, the run goes on: %s', reason)

  def _line(self, done: int, metrics: Mapping[str, float]) -> str:
    """Returns the line that shows a step and its metrics."""
    words = [f'step {done}/{self._num_steps}']
    shown = headline.evaluation(metrics) | headline.training(metrics)
    shown |= {n: metrics[key] for n, key in _NAMES.items() if key in metrics}
    # Adding 0 turns a rounded -0 into 0.
    words += [f'{name} {round(x, 3) + 0.0:.3f}' for name, x in shown.items()]
    if metrics.get(_SKIPPED, 0) > 0:
      words.append(f'skipped {metrics[_SKIPPED]:.0%} of the updates')
    if _THROUGHPUT in metrics:
      words.append(f'{metrics[_THROUGHPUT]:,.0f} tokens/s')
    if done and self._first is None:
      self._first = done, self._clock()
    elif self._first is not None and done > self._first[0]:
      first, since = self._first
      pace = (self._clock() - since) / (done - first)
      seconds = round(pace * max(self._num_steps - done, 0))
      words.append(f'eta {datetime.timedelta(seconds=seconds)}')
    return '  '.join(words)
