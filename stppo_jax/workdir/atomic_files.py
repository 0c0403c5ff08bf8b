"""Changes files as a whole or not at all, even when the disk is full."""

import os
import pathlib
import tempfile


def replace(path: pathlib.Path, data: bytes) -> None:
  """Writes a file, or replaces an earlier file as a whole.

  The data are written to another file in the same folder, which is then
  renamed. So a process that is killed here leaves the old or the new file.

  Raises:
    OSError: writing failed; the old file is unchanged.
  """
  new = path.with_name(f'{path.name}.new')
  try:
    new.write_bytes(data)
    os.replace(new, path)
  except OSError as error:
    new.unlink(missing_ok=True)
    # An error of `write_bytes` may name no file, or the `.new` file, which the
    # user does not know.
    raise OSError(error.errno, error.strerror, str(path)) from error


def append(path: pathlib.Path, data: bytes) -> None:
  """Appends all of the data to a file, or nothing.

  Raises:
    OSError: writing failed; the file is unchanged.
  """
  with open(path, 'ab', buffering=0) as file:
    start = file.tell()
    try:
      while data:
        data = data[file.write(data) :]
    except OSError:
      # If half a line stayed, the next line would be appended to it.
      file.truncate(start)
      raise


def refusal(folder: pathlib.Path) -> str:
  """Returns why a folder is not writable; '' if it is writable.

  The function tries to write a file. To look at permissions would not be
  enough: the superuser has all permissions, but cannot write to /proc.

  Args:
    folder: the folder. If it does not exist yet, the file is written to the
      nearest folder above that exists.
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
