"""Signals, which end a run without losing a finished step.

A handler may run between any two bytecodes of the main thread. Raising from it
in the middle of an update or a save would leave a state that is half consumed,
since updates donate their arguments. So the handler raises only inside
`interruptible` bodies and otherwise only records the signal; the next
`interruptible` raises for it.

A handler waits while the main thread compiles or computes. So another thread
learns of signals from the operating system's side: it says at once what will
happen, and ends the process at a second signal. Nothing is raised then: files
are written in such a way that a process may be killed at any moment. If the
main thread does not react for a while, it also asks the run whether the process
may end without it (`force_exit`).

A run of several processes ends as one: the first signal of any of them is told
to the others, which then abandon what they can as well (`request`).

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
# The signal by which another thread interrupts the main thread.
_REQUEST = signal.SIGUSR1
_IMPORTLIB = '<frozen importlib._bootstrap>'
# Seconds that the main thread has to react before the exit is forced, and
# between two attempts.
_PATIENCE = 1.0
_SHOW_CURSOR = b'\x1b[?25h\n'


class Interrupted(BaseException):
  """Ends the body of `interruptible`.

  It is not an Exception, so that no handler of errors catches it.

  Args:
    exit_code: the exit code of the signal; None: that of another host.

  Attributes:
    exit_code: the exit code of this process. The other hosts end with it, too,
      unless they were told of the signal.
  """

  def __init__(self, exit_code: int | None = None):
    super().__init__('by a signal')
    self.exit_code = exit_code or exits.TRY_AGAIN


def no_force_exit(exit_code: int, *, answered: bool) -> bool:
  """Leaves the end to the main thread; see `Interruption.force_exit`."""
  del exit_code, answered
  return False


class Interruption:
  """Handles SIGINT, SIGTERM and SIGHUP: the first requests an end.

  Starting, collecting and evaluating may be abandoned half-way, because they
  can be done again. An update in progress is finished and saved. A second
  SIGINT or SIGTERM ends the process at once.

  It is entered on the main thread. Inside another one, it takes its place.

  Args:
    owns_process: whether a signal during an import ends the process at once. An
      exception would be raised inside the imported module, which may catch it,
      or be left in a state in which the interpreter crashes at its end.

  Attributes:
    exit_code: the exit code of the first signal; None before it.
    outlook: what the first signal leads to, for the line that is printed.
    on_signal: called on another thread at the first signal.
    signalled: the time of that signal, by `time.monotonic`; None before it.
    grace: seconds from that signal until the process is killed; 0: not known.
    is_told: whether it was said what the signal has led to.
    force_exit: called on another thread while the main thread does not end;
      returns whether the process may end without it. Its arguments are the
      exit code, and whether the main thread knows of the signal. If not, the
      main thread runs no Python code until `force_exit` returns.
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
        continue  # as `nohup` wants it
      self._previous[number] = signal.signal(number, self._receive)
    self._previous[_REQUEST] = signal.signal(_REQUEST, self._interrupt)
    return self

  def __exit__(self, *_) -> None:
    self._left.set()
    for number, handler in self._previous.items():
      signal.signal(number, handler)
    signal.set_wakeup_fd(self._previous_wakeup)
    os.close(self._writer)  # ends the thread
    self._thread.join()
    os.close(self._reader)

  def interruptible(self) -> contextlib.AbstractContextManager[None]:
    """Runs a body that a signal may end with `Interrupted`.

    Raises:
      Interrupted: a signal was received, in the body or before it. The body may
        have caught what the handler raised, or turned it into an error.
    """
    return self._raising(within=True)

  def postponed(self) -> contextlib.AbstractContextManager[None]:
    """Runs a part of such a body that is done as a whole or not at all.

    Raises:
      Interrupted: before it or at its end, after a signal.
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
    """Ends the body of `interruptible`, now or next time, from any thread."""
    if not self._is_interrupted:
      self._requested = True
      main = threading.main_thread().ident
      assert main is not None  # it has been started
      signal.pthread_kill(main, _REQUEST)

  def seconds_left(self) -> float:
    """Returns the seconds until a kill; infinity if none is to be expected."""
    if not self.grace or self.signalled is None:
      return math.inf
    return self.grace - (time.monotonic() - self.signalled)

  @property
  def is_overdue(self) -> bool:
    """Whether the seconds since the signal are about to be over.

    A forced exit is tried every second, and must come before the process is
    killed.
    """
    return self.seconds_left() <= 2 * _PATIENCE

  @property
  def _is_interrupted(self) -> bool:
    return self._requested or self.exit_code is not None

  def _interrupt(self, number: int, frame: types.FrameType | None) -> None:
    """Handles a request, on the main thread."""
    del number, frame
    # The request may have been one to an inner `Interruption` that has ended
    # meanwhile.
    if self._requested and self._interruptible:
      raise Interrupted

  def _receive(self, number: int, frame: types.FrameType | None) -> None:
    """Handles a signal, on the main thread."""
    if self.exit_code is not None:
      return  # The other thread handles a second signal.
    with self._answering:  # not while the exit is forced
      self._answered = True
    # This thread needs the time of the signal, and the other one, which notes
    # it too, may be late.
    self.signalled = self.signalled or time.monotonic()
    self.exit_code = EXIT_CODES[signal.Signals(number)]
    if not self._interruptible:
      return
    if self._owns_process and _is_importing(frame):
      self._announce(number)
      end_process(self.exit_code)
    raise Interrupted(self.exit_code)

  def _watch(self) -> None:
    """Reads the numbers of signals as they arrive, on a thread of its own."""
    received = 0
    while byte := os.read(self._reader, 1):
      number = byte[0]
      if number not in self._previous or number not in EXIT_CODES:
        continue
      if number == signal.SIGHUP:
        # Otherwise what is printed while a run is saved would be an error.
        streams.silence_lost(flush=False)
        # A terminal that closes sends it twice: by itself and by the shell.
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
        streams.say('abandoned; what was saved before remains')
        if os.isatty(1):  # a progress bar hides the cursor
          os.write(1, _SHOW_CURSOR)
        # Without flushing: the main thread may be waiting to write.
        os._exit(EXIT_CODES[signal.Signals(number)])

  def _keep_rescuing(self, exit_code: int) -> None:
    """Ends the process when that loses nothing, unless it ends by itself."""
    while not self._left.wait(_PATIENCE):
      with self._answering:
        if self.force_exit(exit_code, answered=self._answered):
          end_process(exit_code)

  def _announce(self, number: int) -> None:
    """Says once what the first signal leads to."""
    if self._announced.acquire(blocking=False):
      again = 'press again' if number == signal.SIGINT else 'send another one'
      name = signal.Signals(number).name
      streams.say(f'{name}: {self.outlook}; {again} to abandon')


def end_process(exit_code: int) -> None:
  """Ends the process without unwinding, once its output is written.

  Other threads may be in the middle of a program. If the interpreter were taken
  from under them, as at its usual end, some would crash.
  """
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError, ValueError):
      stream.flush()
  os._exit(exit_code)


def _is_importing(frame: types.FrameType | None) -> bool:
  """Returns whether a frame runs for an import."""
  while frame is not None:
    if frame.f_code.co_filename == _IMPORTLIB:
      return True
    frame = frame.f_back
  return False
