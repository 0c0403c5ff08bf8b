"""Keeps Orbax from printing the errors that it also raises.

Orbax reads and writes leaves concurrently. When the first one fails, as on a
full disk or in a damaged checkpoint, it raises that error; but it also logs it,
and the tasks of the other leaves are dropped: Python reports each of them, and
TensorStore reports that it cannot tell them their results. Some hundred lines
of tracebacks would bury the one line that says what has happened.

What is hidden is kept: of several hosts, the one whose part of a save has
failed learns of it here long before Orbax raises it.
"""

import collections
import logging
import re
import sys
import traceback
from typing import Any

_ORBAX = '/orbax/'  # in the path of a file
# Warnings about what is meant to be so.
_ADVICE = (
  'Waiting for previous save',
  'CheckpointManagerOptions.read_only=True',
  'Given directory is read only',
)
# What asyncio logs of a task that has failed and that nobody waits for.
_UNHEARD = 'exception was never retrieved'
# The last error that Orbax has logged.
logged: collections.deque[Exception] = collections.deque(maxlen=1)


def hide_repeated() -> None:
  """Hides what Orbax prints of errors that it raises; may be called again.

  It changes the loggers of absl and asyncio, and the hook for exceptions that
  Python ignores. They still report what has another origin.
  """
  # The same filter is not added twice.
  logging.getLogger('absl').addFilter(_is_not_logged_by_orbax)
  logging.getLogger('asyncio').addFilter(_is_not_unheard)
  report = sys.unraisablehook
  if report.__module__ != __name__:
    sys.unraisablehook = lambda x: None if _is_of_orbax(x) else report(x)


def cause(error: Exception) -> str:
  """Returns the end of an error's message, which names its cause, as one line.

  TensorStore puts the paths of its files before the cause, each followed by a
  colon, and the whole specification of an array after it, in brackets.
  """
  line = ' '.join(str(error).split())
  end = re.split(r" \[\w+='", line)[0].rpartition('": ')[2]
  return end or type(error).__name__


def _is_not_logged_by_orbax(record: logging.LogRecord) -> bool:
  """Returns False for the log records of Orbax that nobody needs.

  Tracebacks are among them, and warnings that a folder is read only, where it
  is opened to be read. Another advises to save less often, because it counts
  the time that a run waits for its last save.
  """
  if _ORBAX not in record.pathname:
    return True
  error = record.exc_info and record.exc_info[1]
  if isinstance(error, Exception):
    logged.append(error)
  return not (error or record.getMessage().startswith(_ADVICE))


def _is_not_unheard(record: logging.LogRecord) -> bool:
  """Returns False for log records about dropped tasks of Orbax."""
  if _UNHEARD not in record.getMessage() or not record.exc_info:
    return True
  frames = traceback.walk_tb(record.exc_info[2])
  return not any(_ORBAX in frame.f_code.co_filename for frame, _ in frames)


def _is_of_orbax(ignored: Any) -> bool:
  """Returns whether an error of Orbax has caused an ignored exception."""
  code = getattr(ignored.object, 'cr_code', None)
  if code is not None and _ORBAX in code.co_filename:
    return True
  # TensorStore reports to a loop that is gone. It calls asyncio from C++, so
  # the traceback begins in asyncio.
  trace = ignored.exc_traceback
  return (
    str(ignored.exc_value) == 'Event loop is closed'
    and trace is not None
    and trace.tb_frame.f_code.co_name == 'call_soon_threadsafe'
  )
