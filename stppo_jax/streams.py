"""Standard streams: safe text, lines of the log, and streams that are lost.

Text of others can hold commands to the terminal. A stream is lost when nobody
reads it any more, as after `train | head`.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import io
import logging
import os
import select
import sys
from typing import IO
import unicodedata

# Control, invisible (bidirectional overrides!), surrogates, private use,
# line and paragraph separators.
_HIDDEN = ('Cc', 'Cf', 'Cs', 'Co', 'Cn', 'Zl', 'Zp')


def escape(text: str) -> str:
  """Returns the text with unprintable characters, but line breaks, escaped."""
  return ''.join(
    char
    if char == '\n' or unicodedata.category(char) not in _HIDDEN
    else char.encode('unicode_escape', 'surrogatepass').decode()
    for char in text
  )


def one_line(text: str) -> str:
  """Returns the text with line breaks escaped, too."""
  return escape(text).replace('\n', '\\n')


def aligned(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
  """Returns the lines of a table whose columns are aligned.

  Args:
    rows: the cells, equally many in each row.
    right: whether all columns but the first are aligned on the right.
  """
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = []
  for row in rows:
    cells = [cell.ljust(width) for cell, width in zip(row, widths)]
    if right:
      cells[1:] = [cell.rjust(n) for cell, n in zip(row[1:], widths[1:])]
    lines.append('  '.join(cells))
  return lines if right else [line.rstrip() for line in lines]


class LogLines(logging.Handler):
  """Prints what the package logs as lines without decoration.

  Attributes:
    show: prints a line that tells how it goes; warnings go to standard error.
    renamed: a text, such as that of a folder, and what is printed for it.
  """

  def __init__(self, show: Callable[[str], None]):
    super().__init__()
    self.show = show
    self.renamed: tuple[str, str] = '', ''

  def emit(self, record: logging.LogRecord) -> None:
    """Prints a record; an error of the stream is raised, see `silence_lost`."""
    if record.levelno < logging.WARNING:
      self.show(record.getMessage().replace(*self.renamed))
    else:
      line = self.format(record).replace(*self.renamed)
      print(line, file=sys.stderr, flush=True)


def show(line: str) -> None:
  """Prints a line, at once."""
  print(line, flush=True)


def show_beside(line: str) -> None:
  """Prints a line beside what a command prints as its result."""
  print(line, file=sys.stderr, flush=True)


def say(line: str) -> None:
  """Prints a line to standard error; an error of the stream is ignored."""
  with contextlib.suppress(OSError, ValueError):
    show_beside(line)


@contextlib.contextmanager
def logged(show: Callable[[str], None] = show) -> Iterator[LogLines]:
  """Prints what the package logs in the body, in place of an outer `logged`.

  Args:
    show: see `LogLines`.
  """
  package = logging.getLogger(__package__)
  # Inside another body its handler is used: two would print each line twice.
  for handler in package.handlers:
    if isinstance(handler, LogLines):
      outside, handler.show = handler.show, show
      try:
        yield handler
      finally:
        handler.show = outside
      return
  handler, level = LogLines(show), package.level
  package.addHandler(handler)
  package.setLevel(logging.INFO)
  package.propagate = False
  try:
    yield handler
  finally:
    package.removeHandler(handler)
    package.setLevel(level)
    package.propagate = True


def silence_lost(*, flush: bool = True) -> bool:
  """Silences the standard streams that are lost; returns whether one was.

  A stream is lost when its reader or its terminal has gone, or when its disk is
  full. What is printed later goes nowhere and is no error.

  Args:
    flush: whether to try to write what is waiting. This waits for a thread that
      is writing.
  """
  lost = [s for s in (sys.stdout, sys.stderr) if _is_lost(s, flush)]
  for stream in lost:
    silence(stream)
  return bool(lost)


def silence(stream: IO[str]) -> None:
  """Discards what is printed to a stream from now on, and what waits in it."""
  with contextlib.suppress(io.UnsupportedOperation):
    # The descriptor is replaced and not the object, because what waits in the
    # stream is written there, too, at the latest when the interpreter ends.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def _is_lost(stream: IO[str], flush: bool) -> bool:
  try:
    poll = select.poll()
    poll.register(stream.fileno(), 0)  # errors are always reported
    if poll.poll(0):
      return True
  except io.UnsupportedOperation:  # no file, as in tests
    return False
  try:
    if flush:
      stream.flush()
  except OSError:
    return True
  return False
