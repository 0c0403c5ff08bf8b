"""Replaces a folder by a new one when the new one is complete.

    .NAME.partial   the new folder while it is written
    .NAME.old       the old folder while the new one gets its name

They are siblings of the folder, hence on the same file system, where a rename
is atomic. If the process is killed at any moment, the name belongs to the old
folder or to the new one. Between the two renames it belongs to none; then the
next writer gives it back to the old folder.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import os
import pathlib
import shutil


@contextlib.contextmanager
def replace_dir(
  directory: str | pathlib.Path, *, ours: Callable[[str], bool]
) -> Iterator[pathlib.Path]:
  """Yields an empty folder to fill, which then takes the place of `directory`.

  On an error `directory` stays as it was.

  Args:
    directory: the folder to replace or create.
    ours: function of a file's name that returns whether the new folder replaces
      such a file of the old one. All other files move into the new folder.
  """
  directory = pathlib.Path(directory).resolve()
  partial = directory.with_name(f'.{directory.name}.partial')
  old = directory.with_name(f'.{directory.name}.old')
  if old.is_dir():  # left by a writer that was killed
    if directory.exists():
      _clear(old, directory, ours)
    else:
      old.rename(directory)
  if partial.is_dir():
    shutil.rmtree(partial)
  partial.mkdir(parents=True)
  try:
    yield partial
    if directory.is_dir() and any(directory.iterdir()):
      directory.rename(old)
    partial.rename(directory)
  except BaseException:
    if old.is_dir() and not directory.exists():
      old.rename(directory)
    shutil.rmtree(partial, ignore_errors=True)
    raise
  if old.is_dir():
    _clear(old, directory, ours)


def _clear(
  old: pathlib.Path, new: pathlib.Path, ours: Callable[[str], bool]
) -> None:
  """Removes the old folder after moving files that are not ours to the new."""
  for path in old.iterdir():
    if not ours(path.name) and not (new / path.name).exists():
      os.rename(path, new / path.name)
  shutil.rmtree(old)
