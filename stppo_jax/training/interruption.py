"""What ends a run from outside: stop where nothing is lost, then save."""

from collections.abc import Iterator
import contextlib
import signal
from typing import Any

_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 75}


class Interrupted(BaseException):
  """Raised inside `abandonable` work; not an error, hence no Exception."""


class Outage(Exception):
  """The retriever answers, yet fails too many queries of one step."""

  exit_code = 75


class Interruption:
  """Ctrl-C and SIGTERM while entered: the first asks, the second ends.

  Starting, collecting and evaluating may be dropped half-way, because they
  can be done again; an update in progress is finished, and saved.

  Attributes:
    exit_code: of the process after the first signal; None without one.
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
    """Work that a signal may cut short with `Interrupted`."""
    if self.exit_code is not None:
      raise Interrupted
    self._abandonable = True
    try:
      yield
    finally:
      self._abandonable = False

  def _receive(self, number: int, _) -> None:
    if self.exit_code is not None:
      # Whoever insists cannot wait for the save; the one before it stands.
      if number == signal.SIGINT:
        raise KeyboardInterrupt
      raise SystemExit(_EXIT_CODES[signal.Signals(number)])
    self.exit_code = _EXIT_CODES[signal.Signals(number)]
    if self._abandonable:
      raise Interrupted
