"""Ctrl-C and SIGTERM: stop where nothing is lost, then save."""

from collections.abc import Iterator
import contextlib
import signal
from typing import Any

_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 75}


class Interrupted(BaseException):
  """Raised inside `abandonable` work; not an error, hence no Exception."""


class Interruption:
  """While entered, the first signal is a request, a second Ctrl-C an end.

  Collecting and evaluating may be dropped half-way, because they are
  functions of the step; an update in progress is finished.
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
    if self.exit_code is not None and number == signal.SIGINT:
      raise KeyboardInterrupt
    self.exit_code = _EXIT_CODES[signal.Signals(number)]
    if self._abandonable:
      raise Interrupted
