"""Says which files a report may replace: none that is something else."""

import os
import pathlib

# Every report has this text near its beginning.
MARK = 'stppo_jax report'
_BEGINNING = 1000  # bytes


def problem(path: pathlib.Path) -> str:
  """Returns why a report must not be written there; '' if it may."""
  try:
    if path.is_dir():
      return f'{path}: is a folder; give a file'
    if not path.parent.is_dir():
      return f'{path}: no such folder: {path.parent}'
    if not os.access(path.parent, os.W_OK):
      return f'{path}: the folder cannot be written'
    if path.exists():
      with open(path, 'rb') as file:
        if MARK.encode() not in file.read(_BEGINNING):
          return f'{path}: exists and is no report; give another file'
  except OSError as error:
    return f'{path}: {error.strerror}'
  return ''
