"""Signals and outages, which end a run without losing a finished step.

A handler may run between any two bytecodes of the main thread. Raising from it
in the middle of an update or a save would leave a state that is half consumed,
since updates donate their arguments. So the handler raises only inside
`abandonable` bodies and otherwise only records the signal; the next
`abandonable` raises for it.
"""

from collections.abc import Iterator
import contextlib
import signal
from typing import Any

_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 75}


class Interrupted(BaseException):
  """Ends the body of `abandonable`.

  It is not an Exception, so that no handler of errors catches it.
  """


class Outage(Exception):
  """The retriever is ready, yet fails too many queries of one step."""

  exit_code = 75


class Interruption:
  """Handles SIGINT and SIGTERM: the first requests an end, the second ends.

  Starting, collecting and evaluating may be abandoned half-way, because they
  can be done again. An update in progress is finished and saved.

  Attributes:
    exit_code: the exit code of the first signal; None before it.
  """

  def __init__(self):
    self.exit_code: int | None = None
    self._abandonable = False
    self._previous: dict[int, Any] = {}

  def __enter__(self) -> 'Interruption':
    for number in _EXIT_CODES:
      self._previous[number] = signal.signal(number, self._receive)
    return self

  def __exit__(self, *_) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  @contextlib.contextmanager
  def abandonable(self) -> Iterator[None]:
    """Runs a body that a signal may end with `Interrupted`.

    Raises:
      Interrupted: a signal was received, in the body or before it.
    """
    if self.exit_code is not None:
      raise Interrupted
    self._abandonable = True
    try:
      yield
    finally:
      self._abandonable = False

  def _receive(self, number: int, _) -> None:
    if self.exit_code is not None:
      # A second signal ends the process without a save: the last checkpoint
      # remains.
      if number == signal.SIGINT:
        raise KeyboardInterrupt
      raise SystemExit(_EXIT_CODES[signal.Signals(number)])
    self.exit_code = _EXIT_CODES[signal.Signals(number)]
    if self._abandonable:
      raise Interrupted
