"""Signals and outages, which end a run where nothing is lost."""

from collections.abc import Iterator
import contextlib
import signal
from typing import Any

_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 75}


class Interrupted(BaseException):
  """Ends `abandonable` work; no Exception, because it is not an error."""


class Outage(Exception):
  """The retriever answers, yet fails too many queries of one step."""

  exit_code = 75


class Interruption:
  """Handles Ctrl-C and SIGTERM: the first requests an end, the second ends.

  Starting, collecting and evaluating may be abandoned half-way, because they
  can be done again. An update in progress is finished and saved.

  Attributes:
    exit_code: the exit code that the first signal asks for; None before it.
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
      Interrupted: also at once, if a signal came before.
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
      # A second signal cannot wait for the save; the checkpoint before stays.
      if number == signal.SIGINT:
        raise KeyboardInterrupt
      raise SystemExit(_EXIT_CODES[signal.Signals(number)])
    self.exit_code = _EXIT_CODES[signal.Signals(number)]
    if self._abandonable:
      raise Interrupted
