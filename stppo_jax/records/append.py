"""Appends records to a file, whole ones only, even when the disk is full."""

import pathlib


def append(path: pathlib.Path, data: bytes) -> None:
  """Appends all of the data or, if that fails, none of it.

  Raises:
    OSError: nothing was written; the file is as it was.
  """
  with open(path, 'ab', buffering=0) as file:
    start = file.tell()
    try:
      while data:
        data = data[file.write(data) :]
    except OSError:
      file.truncate(start)
      raise
