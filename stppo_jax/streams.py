"""Standard streams that cannot be written any more, as after `train | head`."""

import contextlib
import io
import os
import select
import sys
from typing import IO


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
  """Sends what is printed to a stream nowhere, and what waits in it too."""
  with contextlib.suppress(io.UnsupportedOperation):
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
