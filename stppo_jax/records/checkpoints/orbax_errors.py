"""Keeps Orbax from printing the errors that it also raises.

Orbax reads and writes leaves concurrently. When a leaf fails, for example on a
full disk or in a damaged checkpoint, Orbax raises the error and also logs it.
Orbax drops the tasks of the other leaves. Python then reports each dropped
task, and TensorStore reports that it cannot deliver results to dropped tasks.
Hundreds of lines of tracebacks would bury the one line that names the cause.

The last error that Orbax has logged is kept. If several hosts save, the host
whose part has failed finds the error here long before Orbax raises it.
"""

import collections
import logging
import re
import sys
import traceback
from typing import Any

_ORBAX = '/orbax/'  # a part of the path of every file of Orbax
# The beginnings of warnings about intended behaviour.
_ADVICE = (
  'Waiting for previous save',
  'CheckpointManagerOptions.read_only=True',
  'Given directory is read only',
)
# A part of the message of asyncio about a failed task that nothing awaits.
_UNHEARD = 'exception was never retrieved'
# The last error that Orbax has logged.
logged: collections.deque[Exception] = collections.deque(maxlen=1)


def hide_repeated() -> None:
  """Hides the reports of errors that Orbax also raises.

  The function changes the loggers of absl and asyncio, and the hook for
  exceptions that Python ignores. All other errors are still reported.
  Further calls of the function change nothing.
  """
  # `addFilter` does not add the same filter twice.
  logging.getLogger('absl').addFilter(_is_not_logged_by_orbax)
  logging.getLogger('asyncio').addFilter(_is_not_unheard)
  report = sys.unraisablehook
  if report.__module__ != __name__:
    sys.unraisablehook = lambda x: None if _is_of_orbax(x) else report(x)


def cause(error: Exception) -> str:
  """Returns the part of an error's message that names the cause, as one line.

  In a message of TensorStore, paths of files come before the cause, each
  followed by a colon. After the cause comes the specification of an array, in
  brackets.
  """
  line = ' '.join(str(error).split())
  end = re.split(r" \[\w+='", line)[0].rpartition('": ')[2]
  return end or type(error).__name__


def _is_not_logged_by_orbax(record: logging.LogRecord) -> bool:
  """Returns False for the log records of Orbax that nobody needs.

  These are tracebacks, warnings about folders that are meant to be read-only,
  and the advice to save less often. Orbax gives this advice because it measures
  how long a run waits for its last save.
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
  """Returns whether an exception that Python ignores comes from Orbax."""
  code = getattr(ignored.object, 'cr_code', None)
  if code is not None and _ORBAX in code.co_filename:
    return True
  # TensorStore reports a result to an event loop that is closed. It calls
  # asyncio from C++, so the traceback begins in asyncio, not in Orbax.
  trace = ignored.exc_traceback
  return (
    str(ignored.exc_value) == 'Event loop is closed'
    and trace is not None
    and trace.tb_frame.f_code.co_name == 'call_soon_threadsafe'
  )
