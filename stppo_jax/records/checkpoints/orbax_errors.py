"""Notes the errors that Orbax logs, and names their causes.

Of several hosts, the one whose part of a save has failed waits in Orbax for the
parts of all others before Orbax raises the error. But it logs the error at
once, and so is noted here long before that.
"""

import collections
import logging
import re

_ORBAX = '/orbax/'  # in the path of a file
# Warnings about what is meant to be so.
_ADVICE = (
  'Waiting for previous save',
  'CheckpointManagerOptions.read_only=True',
  'Given directory is read only',
)
# The last error that Orbax has logged.
logged: collections.deque[Exception] = collections.deque(maxlen=1)


def note_logged() -> None:
  """Begins to note what Orbax logs; may be called again."""
  # The same filter is not added twice.
  for name in ('absl', 'asyncio'):
    logging.getLogger(name).addFilter(_note)


def cause(error: Exception) -> str:
  """Returns the end of an error's message, which names its cause, as one line.

  TensorStore puts the paths of its files before the cause, each followed by a
  colon, and the whole specification of an array after it, in brackets.
  """
  line = ' '.join(str(error).split())
  end = re.split(r" \[\w+='", line)[0].rpartition('": ')[2]
  return end or type(error).__name__


def _note(record: logging.LogRecord) -> bool:
  """Notes the error of a log record; returns whether it is to be printed.

  The traceback of an error of Orbax is not: whoever waits for the save or reads
  the checkpoint gets the error, and tells of it in one line. Nor is what
  asyncio reports of the other leaves, whose tasks Orbax drops after an error.
  """
  is_dropped, message = record.name == 'asyncio', record.getMessage()
  if _ORBAX not in (message if is_dropped else record.pathname):
    return True
  error = record.exc_info and record.exc_info[1]
  if not isinstance(error, Exception):
    return not message.startswith(_ADVICE)
  # Dropped tasks are reported at any time, also during the next save.
  if not is_dropped:
    logged.append(error)
  return False
