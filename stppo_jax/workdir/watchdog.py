"""Writes the stacks of all threads when a phase of a run takes far too long.

    WORKDIR/stacks/host0        the stacks of the first host

From outside, a run that hangs looks like a run that works. The stacks show the
call in which the run waits: for a retriever, a file system, a lock, or another
host.
"""

import collections
from collections.abc import Callable, Iterator
import contextlib
import datetime
import faulthandler
import logging
import pathlib
import statistics
import threading
import time

_log = logging.getLogger(__name__)
# A phase takes far too long if it takes more than `_FACTOR` times its usual
# duration, and more than `_LEAST` seconds. The second limit is needed because a
# short phase may take many times as long when the machine is busy.
_FACTOR = 10.0
_LEAST = 60.0  # seconds
# The limit, in seconds, for a phase that has never ended before. Its usual
# duration is not known, and it may compile programs.
_FIRST = 1800.0
# The usual duration of a phase is the median of this number of last durations.
_REMEMBERED = 20
_EVERY = 1.0  # seconds between two checks of the present phase


class Watchdog:
  """Watches how long the phases of a run take.

  Args:
    clock: returns seconds since an arbitrary moment.
    least: the number of seconds that every phase may take.
    every: the seconds between two checks of the present phase.
  """

  def __init__(
    self,
    *,
    clock: Callable[[], float] = time.monotonic,
    least: float = _LEAST,
    every: float = _EVERY,
  ):
    self._clock, self._least, self._every = clock, least, every
    self._durations: dict[str, collections.deque[float]] = {}
    self._phase, self._since = '', clock()
    self._has_told = False  # whether the stacks of this phase were written
    # Guards the phase, which the thread of `watching` reads.
    self._lock = threading.Lock()

  @contextlib.contextmanager
  def watching(self, path: pathlib.Path) -> Iterator[None]:
    """Checks regularly, in the `with` block, how long the present phase takes.

    Args:
      path: the file to which the stacks are appended.
    """
    ended = threading.Event()

    def watch():
      while not ended.wait(self._every):
        self.look(path)

    thread = threading.Thread(target=watch, name='watchdog', daemon=True)
    thread.start()
    try:
      yield
    finally:
      ended.set()
      thread.join()

  def enter_phase(self, phase: str) -> None:
    """Ends the present phase and begins another; '' stands for no phase."""
    with self._lock:
      now = self._clock()
      if self._phase:
        durations = self._durations.setdefault(
          self._phase, collections.deque(maxlen=_REMEMBERED)
        )
        durations.append(now - self._since)
      self._phase, self._since, self._has_told = phase, now, False

  def look(self, path: pathlib.Path) -> None:
    """Writes the stacks, once per phase, if the present phase takes too long.

    Args:
      path: the file to which the stacks are appended.
    """
    with self._lock:
      phase, seconds = self._phase, self._clock() - self._since
      if self._has_told or not phase:
        return
      limit, known = _FIRST, 'and has not ended before'
      if phase in self._durations:
        usual = statistics.median(self._durations[phase])
        limit = max(_FACTOR * usual, self._least)
        known = f'usually {usual:.3g} s'
      if seconds <= limit:
        return
      self._has_told = True
    told = f'{phase} has taken {seconds:.0f} s, {known}'
    try:
      path.parent.mkdir(parents=True, exist_ok=True)
      with open(path, 'a', encoding='utf-8') as file:
        file.write(f'{datetime.datetime.now().astimezone()}: {told}\n')
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        file.write('\n')
      where = f'the stacks of all threads are in {path}'
    except OSError as error:
      where = f'the stacks cannot be written: {error}'
    _log.warning('%s; %s', told, where)
