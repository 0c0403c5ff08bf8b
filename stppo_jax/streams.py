"""Standard streams: safe text, lines of the log, and lost streams.

Text from models, files and servers can hold terminal control characters, so it
is escaped before it is printed. A stream is lost when nobody reads it any more,
for example in `train | head` after `head` has ended.
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

# The Unicode categories of control characters, invisible format characters
# (such as bidirectional overrides), surrogates, private use, unassigned
# characters, and line and paragraph separators.
_HIDDEN = ('Cc', 'Cf', 'Cs', 'Co', 'Cn', 'Zl', 'Zp')


def escape(text: str) -> str:
  """Returns the text with unprintable characters escaped; keeps line breaks."""
  return ''.join(
    char
    if char == '\n' or unicodedata.category(char) not in _HIDDEN
    else char.encode('unicode_escape', 'surrogatepass').decode()
    for char in text
  )


def one_line(text: str) -> str:
  """Returns the text with unprintable characters and line breaks escaped."""
  return escape(text).replace('\n', '\\n')


def aligned(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
  """Returns the lines of a table whose columns are aligned.

  Args:
    rows: the cells of each row; all rows have the same number of cells.
    right: whether all columns after the first are aligned on the right.
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
  """Prints the log records of the package as plain lines.

  Attributes:
    show: function that prints the line of a record below the level WARNING.
      Warnings and errors go to standard error.
    renamed: a pair of texts. Lines are printed with the second text in place of
      the first text, which may be a folder.
  """

  def __init__(self, show: Callable[[str], None]):
    super().__init__()
    self.show = show
    self.renamed: tuple[str, str] = '', ''

  def emit(self, record: logging.LogRecord) -> None:
    """Prints a record, and raises any error of the stream.

    `silence_lost` handles the streams that raised an error.
    """
    if record.levelno < logging.WARNING:
      self.show(record.getMessage().replace(*self.renamed))
    else:
      line = self.format(record).replace(*self.renamed)
      print(line, file=sys.stderr, flush=True)


def show(line: str) -> None:
  """Prints a line to standard output and flushes it."""
  print(line, flush=True)


def show_beside(line: str) -> None:
  """Prints a line to standard error, apart from a command's result."""
  print(line, file=sys.stderr, flush=True)


def say(line: str) -> None:
  """Prints a line to standard error and ignores errors of the stream."""
  with contextlib.suppress(OSError, ValueError):
    show_beside(line)


@contextlib.contextmanager
def logged(show: Callable[[str], None] = show) -> Iterator[LogLines]:
  """Prints the log records of the package while the body runs.

  Inside the body of an outer `logged`, `show` replaces the outer function.

  Args:
    show: see `LogLines`.
  """
  package = logging.getLogger(__package__)
  # Inside the body of another `logged`, the handler of that body is used,
  # because two handlers would print each line twice.
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
  """Silences the lost standard streams; returns whether there was one.

  A stream is lost when its reader or its terminal has gone, or when its disk is
  full. Text that is printed to it later is discarded and raises no error.

  Args:
    flush: whether to try to write the buffered text. The flush waits for any
      thread that is writing.
  """
  lost = [s for s in (sys.stdout, sys.stderr) if _is_lost(s, flush)]
  for stream in lost:
    silence(stream)
  return bool(lost)


def silence(stream: IO[str]) -> None:
  """Discards the buffered text of a stream and all text printed to it later."""
  with contextlib.suppress(io.UnsupportedOperation):
    # The file descriptor is replaced and not the stream object, because the
    # buffered text is still written to the descriptor, at the latest when the
    # interpreter ends.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def _is_lost(stream: IO[str], flush: bool) -> bool:
  try:
    poll = select.poll()
    # An empty mask of events suffices, because poll always reports errors.
    poll.register(stream.fileno(), 0)
    if poll.poll(0):
      return True
  except io.UnsupportedOperation:  # the stream has no descriptor, as in tests
    return False
  try:
    if flush:
      stream.flush()
  except OSError:
    return True
  return False
