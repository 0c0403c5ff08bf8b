"""Decides which files a report may replace: only files of earlier reports."""

import pathlib

from stppo_jax.workdir import atomic_files

# Every report has this text near its beginning.
MARK = 'stppo_jax report'
_BEGINNING = 1000  # the number of bytes that are searched for the mark


def figures(path: pathlib.Path) -> pathlib.Path:
  """Returns the folder for the figures of a report in Markdown."""
  return path.with_name(f'{path.stem}-figures')


def problem(path: pathlib.Path, *, has_figures: bool = False) -> str:
  """Returns the reason against writing a report to a path; '' if there is none.

  Args:
    path: the file of the report.
    has_figures: whether the report also has a folder of figures.
  """
  try:
    if path.is_dir():
      return f'{path}: is a folder; give a file'
    if not path.parent.is_dir():
      return f'{path}: no such folder: {path.parent}'
    if reason := atomic_files.refusal(path.parent):
      return f'{path}: {reason}'
    if path.exists():
      with open(path, 'rb') as file:
        if MARK.encode() not in file.read(_BEGINNING):
          return f'{path}: exists and is no report; give another file'
    # If the report exists, its folder of figures was made together with it, so
    # the folder may be replaced too.
    folder = figures(path)
    is_own = path.exists() and folder.is_dir()
    if has_figures and folder.exists() and not is_own:
      return (
        f'{path}: its figures would be written to {folder}, which exists; '
        'give another file'
      )
  except OSError as error:
    return f'{path}: {error.strerror}'
  return ''
