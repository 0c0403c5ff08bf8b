"""Changes files as a whole or not at all, even when the disk is full."""

import os
import pathlib
import tempfile


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
  except OSError as error:
    new.unlink(missing_ok=True)
    # An error of writing names no file, and the user did not name this one.
    raise OSError(error.errno, error.strerror, str(path)) from error


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
      # Half a line would be glued to the next one.
      file.truncate(start)
      raise


def refusal(folder: pathlib.Path) -> str:
  """Returns why files cannot be made in a folder; '' if they can.

  Permissions would not tell: the superuser has all of them, and cannot write to
  /proc nevertheless.

  Args:
    folder: the folder, which may not exist yet.
  """
  existing = folder.absolute()
  while not existing.exists():
    existing = existing.parent
  try:
    with tempfile.TemporaryFile(dir=existing) as file:
      file.write(b'written')
      file.flush()
      os.fsync(file.fileno())
  except OSError as error:
    return f'{existing} cannot be written ({error.strerror})'
  return ''
