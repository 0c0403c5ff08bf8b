"""How commands end: exit codes, and errors whose message is one line.

An exception with an `exit_code` is an expected end: its message is printed
without a traceback. One that also has `saves` ends a run that has begun: if it
is true, every host saves the last finished step first.
"""

from collections.abc import Iterator
import contextlib

USAGE = 2  # a wrong flag, key or file
DAMAGED = 3  # only damaged checkpoints are left
BUG = 70
TRY_AGAIN = 75  # the same command goes on, now or later
ENDED = 76  # too many skipped updates, or an alarm
INTERRUPTED = 130
UNREAD = 141  # nobody reads the output


class Misconfigured(Exception):
  """A config that does not fit its files or the devices; a line per reason."""

  exit_code = USAGE


class RunEnded(Exception):
  """Ends a run whose last finished step can be saved."""

  exit_code = TRY_AGAIN
  saves = True


@contextlib.contextmanager
def naming(
  subject: str, kinds: tuple[type[Exception], ...] = (OSError, ValueError)
) -> Iterator[None]:
  """Raises `Misconfigured` with a subject before each line of an error.

  Raises:
    Misconfigured: 'SUBJECT: LINE' for an error of one of these kinds.
  """
  try:
    yield
  except kinds as error:
    lines = (getattr(error, 'strerror', None) or str(error)).splitlines()
    text = '\n'.join(f'{subject}: {line}' for line in lines)
    raise Misconfigured(text) from error


@contextlib.contextmanager
def as_misconfigured(subject: str = '') -> Iterator[None]:
  """Raises `Misconfigured` for a ValueError or OSError of the body.

  The line begins with the file of an OSError, or the subject if it has none.

  Raises:
    Misconfigured: see above. An error with an exit code stays what it is, such
      as that of a bucket, which may be in reach later.
  """
  try:
    yield
  except (ValueError, OSError) as error:
    # An error with an exit code says by itself how the command ends.
    if hasattr(error, 'exit_code'):
      raise
    reason = getattr(error, 'strerror', None)
    name = getattr(error, 'filename', None) or subject
    line = f'{name}: {reason}' if reason and name else reason or str(error)
    raise Misconfigured(line) from error
