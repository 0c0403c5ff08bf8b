"""A folder that stands under its name only when it is whole.

    .NAME.partial   what is being written
    .NAME.old       what stood under the name, until the new one does

All are siblings, hence on one file system. Killed at any moment, the name
holds the old folder or the new one; between two renames it may hold none, and
then the next writer puts the old one back.
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
  """Gives an empty folder to fill, which then takes the place of `directory`.

  On an error `directory` stays as it was.

  Args:
    directory: may exist.
    ours: whether a file of that name in the old folder is replaced; all others
      move into the new one.
  """
  directory = pathlib.Path(directory).resolve()
  partial = directory.with_name(f'.{directory.name}.partial')
  old = directory.with_name(f'.{directory.name}.old')
  if old.is_dir():  # of a writer that was killed
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
  """Removes a folder that was replaced; what is not ours moves on."""
  for path in old.iterdir():
    if not ours(path.name) and not (new / path.name).exists():
      os.rename(path, new / path.name)
  shutil.rmtree(old)
