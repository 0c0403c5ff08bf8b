"""Manages the private folder in which an engine writes weights for a server."""

import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile
import weakref

_PREFIX = 'stppo_jax-weights-'
_LOCK = 'lock'


class WeightsFolder:
  """Makes a temporary folder for the weights that a server loads.

  A process that is killed leaves its folder behind, with gigabytes of weights.
  So the owner of a folder keeps a file in the folder locked. A process that
  makes a new folder first removes all folders whose file is no longer locked.

  The folder is removed when this object is garbage-collected, or when the
  process exits.

  Attributes:
    path: the folder.
  """

  def __init__(self):
    _remove_abandoned()
    self.path = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX))
    # The file is locked before it gets its final name, so no process can find
    # the file unlocked.
    unnamed = self.path / f'{_LOCK}.new'
    descriptor = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unnamed.rename(self.path / _LOCK)
    weakref.finalize(self, _remove, self.path, descriptor)


def _remove_abandoned() -> None:
  """Removes this user's folders whose owner processes have ended."""
  for path in pathlib.Path(tempfile.gettempdir()).glob(f'{_PREFIX}*'):
    # A folder may be removed at any moment, by its owner or another process.
    with contextlib.suppress(OSError):
      if path.lstat().st_uid != os.getuid():
        continue
      descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
      try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
      finally:
        os.close(descriptor)


def _remove(path: pathlib.Path, descriptor: int) -> None:
  shutil.rmtree(path, ignore_errors=True)
  os.close(descriptor)
