"""Signals, which end a run without losing a finished step.

A signal handler may run between any two bytecodes of the main thread. An
exception from the handler in the middle of an update or a save would leave a
half consumed state, since updates donate their arguments. So the handler raises
only inside `interruptible` bodies. Everywhere else it records the signal, and
the next `interruptible` raises the exception.

Python runs no handler while the main thread compiles or computes. So a second
thread reads the signals from a pipe. It prints a line at once, and at a second
signal it ends the process without raising anything. This is safe, because files
are written in such a way that a process may be killed at any moment. After the
first signal a third thread asks the run, once a second, whether the process may
end without the main thread (`force_exit`).

All processes of a run end together. The first process that gets a signal tells
the other processes. These then also abandon any work that may be abandoned
(`request`).

This module imports little, so that signals are handled from the beginning.
"""

from collections.abc import Callable, Iterator
import contextlib
import math
import os
import signal
import sys
import threading
import time
import types
from typing import Any

from stppo_jax import exits
from stppo_jax import streams

EXIT_CODES = {
  signal.SIGINT: exits.INTERRUPTED,
  signal.SIGTERM: exits.TRY_AGAIN,
  signal.SIGHUP: exits.TRY_AGAIN,
}
# The signal with which another thread interrupts the main thread.
_REQUEST = signal.SIGUSR1
_IMPORTLIB = '<frozen importlib._bootstrap>'
# The main thread has this many seconds to react to a signal before an exit is
# forced. The same time passes between two attempts to force an exit.
_PATIENCE = 1.0
_SHOW_CURSOR = b'\x1b[?25h\n'


class Interrupted(BaseException):
  """Ends the body of `interruptible`.

  The class is not a subclass of Exception, so that no `except Exception`
  catches it.

  Args:
    exit_code: the exit code of the signal; None, if another host received the
      signal, stands for `exits.TRY_AGAIN`.

  Attributes:
    exit_code: the exit code with which this process ends.
  """

  def __init__(self, exit_code: int | None = None):
    super().__init__('by a signal')
    self.exit_code = exit_code or exits.TRY_AGAIN


def no_force_exit(exit_code: int, *, answered: bool) -> bool:
  """Never allows a forced exit; see `Interruption.force_exit`."""
  del exit_code, answered
  return False


class Interruption:
  """Handles SIGINT, SIGTERM and SIGHUP: the first signal requests an end.

  Starting, collecting and evaluating may be abandoned half-way, because they
  can be done again. An update in progress is finished and saved. A second
  SIGINT or SIGTERM ends the process at once.

  Enter the context on the main thread. Inside the context of an outer
  `Interruption`, the inner one handles the signals.

  Args:
    owns_process: whether a signal during an import ends the process at once. An
      exception would be raised inside the imported module. The module might
      catch the exception, or stay in a state in which the interpreter crashes
      when it ends.

  Attributes:
    exit_code: the exit code of the first signal; None before the signal.
    outlook: the printed words that announce the effect of the first signal.
    on_signal: called on another thread at the first signal.
    signalled: the time of the first signal, by `time.monotonic`; None before
      the signal.
    grace: the seconds from the first signal until the system kills the process;
      0 if they are not known.
    is_told: whether a line has told the user how the run ended.
    force_exit: called on another thread while the main thread does not end;
      returns whether the process may end without the main thread. Its arguments
      are the exit code, and whether the main thread knows of the signal. If the
      main thread does not know, its handler waits until `force_exit` returns,
      so the main thread runs no other Python code until then.
  """

  def __init__(self, *, owns_process: bool = False):
    self.exit_code: int | None = None
    self.outlook = 'ending'
    self.on_signal: Callable[[], None] = lambda: None
    self.force_exit: Callable[..., bool] = no_force_exit
    self.signalled: float | None = None
    self.grace = 0.0
    self.is_told = False
    self._answering = threading.Lock()
    self._answered = False
    self._left = threading.Event()
    self._requested = False
    self._owns_process = owns_process
    self._interruptible = False
    self._announced = threading.Lock()
    self._previous: dict[int, Any] = {}

  def __enter__(self) -> 'Interruption':
    self._reader, self._writer = os.pipe()
    os.set_blocking(self._writer, False)
    self._thread = threading.Thread(
      target=self._watch, name='signals', daemon=True
    )
    self._thread.start()
    self._previous_wakeup = signal.set_wakeup_fd(
      self._writer, warn_on_full_buffer=False
    )
    for number in EXIT_CODES:
      if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
        continue  # `nohup` has set the process to ignore SIGHUP
      self._previous[number] = signal.signal(number, self._receive)
    self._previous[_REQUEST] = signal.signal(_REQUEST, self._interrupt)
    return self

  def __exit__(self, *_) -> None:
    self._left.set()
    for number, handler in self._previous.items():
      signal.signal(number, handler)
    signal.set_wakeup_fd(self._previous_wakeup)
    os.close(self._writer)  # ends the thread that reads from the pipe
    self._thread.join()
    os.close(self._reader)

  def interruptible(self) -> contextlib.AbstractContextManager[None]:
    """Runs a body that a signal may end with `Interrupted`.

    Raises:
      Interrupted: a signal came in the body or before it. The error is raised
        even if the body has caught the handler's exception, or has raised
        another exception in its place.
    """
    return self._raising(within=True)

  def postponed(self) -> contextlib.AbstractContextManager[None]:
    """Runs a part of an `interruptible` body that a signal must not cut short.

    Raises:
      Interrupted: a signal came before the part, which then does not run, or
        during the part, which then is finished first.
    """
    return self._raising(within=False)

  @contextlib.contextmanager
  def _raising(self, *, within: bool) -> Iterator[None]:
    outside, self._interruptible = self._interruptible, within
    try:
      if not self._is_interrupted:
        yield
    except Exception as error:
      if self._is_interrupted:
        raise Interrupted(self.exit_code) from error
      raise
    finally:
      self._interruptible = outside
    if self._is_interrupted:
      raise Interrupted(self.exit_code)

  def request(self) -> None:
    """Ends the present or the next `interruptible` body, from any thread."""
    if not self._is_interrupted:
      self._requested = True
      main = threading.main_thread().ident
      assert main is not None  # a running process has a main thread
      signal.pthread_kill(main, _REQUEST)

  def seconds_left(self) -> float:
    """Returns the seconds until the system kills the process.

    The result is infinity before a signal, and if the grace is not known.
    """
    if not self.grace or self.signalled is None:
      return math.inf
    return self.grace - (time.monotonic() - self.signalled)

  @property
  def is_overdue(self) -> bool:
    """Whether the system is about to kill the process.

    The result becomes true so early that a forced exit, which is tried every
    second, comes before the kill.
    """
    return self.seconds_left() <= 2 * _PATIENCE

  @property
  def _is_interrupted(self) -> bool:
    return self._requested or self.exit_code is not None

  def _interrupt(self, number: int, frame: types.FrameType | None) -> None:
    """Handles a call of `request`, on the main thread."""
    del number, frame
    # The first check is for requests to an inner `Interruption` that has ended
    # meanwhile. Such a request must not end a body of this `Interruption`.
    if self._requested and self._interruptible:
      raise Interrupted

  def _receive(self, number: int, frame: types.FrameType | None) -> None:
    """Handles a signal, on the main thread."""
    if self.exit_code is not None:
      return  # the thread `_watch` handles a second signal
    with self._answering:  # waits until no call of `force_exit` runs
      self._answered = True
    # The thread `_watch` also notes the time of the signal, but it may be late,
    # and the main thread needs the time now.
    self.signalled = self.signalled or time.monotonic()
    self.exit_code = EXIT_CODES[signal.Signals(number)]
    if not self._interruptible:
      return
    if self._owns_process and _is_importing(frame):
      self._announce(number)
      end_process(self.exit_code)
    raise Interrupted(self.exit_code)

  def _watch(self) -> None:
    """Reads the numbers of arriving signals and reacts, on its own thread."""
    received = 0
    while byte := os.read(self._reader, 1):
      number = byte[0]
      if number not in self._previous or number not in EXIT_CODES:
        continue
      if number == signal.SIGHUP:
        # The terminal may be closed. Without this call, printing a line while
        # the run is saved would raise an error.
        streams.silence_lost(flush=False)
        # When a terminal closes, SIGHUP comes twice: from the terminal and from
        # the shell. The second SIGHUP must not abandon the run.
        if received:
          continue
      received += 1
      if received == 1:
        self.signalled = self.signalled or time.monotonic()
        self._announce(number)
        self.on_signal()
        exit_code = EXIT_CODES[signal.Signals(number)]
        threading.Thread(
          target=self._keep_rescuing, args=(exit_code,), daemon=True
        ).start()
      else:
        streams.say('abandoned; everything saved before is kept')
        if os.isatty(1):  # a progress bar may have hidden the cursor
          os.write(1, _SHOW_CURSOR)
        # No stream is flushed, because the main thread may hold the stream's
        # lock while it waits to write.
        os._exit(EXIT_CODES[signal.Signals(number)])

  def _keep_rescuing(self, exit_code: int) -> None:
    """Asks `force_exit` every second, and ends the process once it agrees."""
    while not self._left.wait(_PATIENCE):
      with self._answering:
        if self.force_exit(exit_code, answered=self._answered):
          end_process(exit_code)

  def _announce(self, number: int) -> None:
    """Prints, only once, a line that announces the effect of the signal."""
    if self._announced.acquire(blocking=False):
      again = 'press again' if number == signal.SIGINT else 'send another one'
      name = signal.Signals(number).name
      streams.say(f'{name}: {self.outlook}; {again} to abandon')


def end_process(exit_code: int) -> None:
  """Writes the waiting output and ends the process without cleaning up.

  Other threads may be in the middle of a compiled program. Some of them would
  crash if the interpreter shut down as usual.
  """
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError, ValueError):
      stream.flush()
  os._exit(exit_code)


def _is_importing(frame: types.FrameType | None) -> bool:
  """Returns whether a frame runs while a module is being imported."""
  while frame is not None:
    if frame.f_code.co_filename == _IMPORTLIB:
      return True
    frame = frame.f_back
  return False
