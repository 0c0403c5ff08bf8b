"""How commands end: exit codes, and errors whose message is one line.

An exception with an `exit_code` is an expected end: its message is printed
without a traceback. An exception that also has `saves` ends a run that has
begun. If `saves` is true, every host first saves the last finished step.
"""

from collections.abc import Iterator
import contextlib

USAGE = 2  # a wrong flag, key or file
DAMAGED = 3  # only damaged checkpoints are left
BUG = 70
TRY_AGAIN = 75  # the same command, started again, continues
ENDED = 76  # too many skipped updates, or an alarm of `alarms.stop`
INTERRUPTED = 130
UNREAD = 141  # nobody reads the output


class Misconfigured(Exception):
  """Says why a config does not fit its files or devices, one reason a line."""

  exit_code = USAGE


class RunEnded(Exception):
  """Ends a run whose last finished step can be saved."""

  exit_code = TRY_AGAIN
  saves = True


@contextlib.contextmanager
def naming(
  subject: str, kinds: tuple[type[Exception], ...] = (OSError, ValueError)
) -> Iterator[None]:
  """Turns errors of the body into `Misconfigured`, with a subject.

  Args:
    subject: precedes each line of the error's message, as in 'SUBJECT: LINE'.
    kinds: the classes of the errors.

  Raises:
    Misconfigured: the body has raised an error of one of these classes.
  """
  try:
    yield
  except kinds as error:
    lines = (getattr(error, 'strerror', None) or str(error)).splitlines()
    text = '\n'.join(f'{subject}: {line}' for line in lines)
    raise Misconfigured(text) from error


@contextlib.contextmanager
def as_misconfigured(subject: str = '') -> Iterator[None]:
  """Turns a ValueError or OSError of the body into `Misconfigured`.

  The message for an OSError begins with the error's file, or with the subject
  if the error names no file. A ValueError keeps its own message.

  Raises:
    Misconfigured: see above. An error with an exit code passes unchanged, such
      as the error of a bucket that may be reachable later.
  """
  try:
    yield
  except (ValueError, OSError) as error:
    # The error's own exit code says how the command ends.
    if hasattr(error, 'exit_code'):
      raise
    reason = getattr(error, 'strerror', None)
    name = getattr(error, 'filename', None) or subject
    line = f'{name}: {reason}' if reason and name else reason or str(error)
    raise Misconfigured(line) from error
