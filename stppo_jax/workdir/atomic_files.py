"""Changes files as a whole or not at all, even when the disk is full."""

import os
import pathlib


def replace(path: pathlib.Path, data: bytes) -> None:
  """Writes a file, in place of an earlier one.

  The data are written to a file beside it, which is then renamed. So a process
  that is killed here leaves the old file or the new one.

  Raises:
    OSError: the old file is as it was.
  """
  new = path.with_name(f'{path.name}.new')
  try:
    new.write_bytes(data)
    os.replace(new, path)
  except OSError:
    new.unlink(missing_ok=True)
    raise


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
