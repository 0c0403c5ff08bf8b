"""Appending whole records: a full disk must not leave half of one."""

import pathlib


def append(path: pathlib.Path, data: bytes) -> None:
  """Appends all of the data, or nothing of it.

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
