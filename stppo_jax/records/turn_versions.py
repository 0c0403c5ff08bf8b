"""Records which policies wrote the turns of a run, so that it can be repeated.

    WORKDIR/versions-000012.json        those of step 12
           /versions-000012-host3.json  those of another host

A file holds, for each collection of the step, the versions of the turns of each
of its rows. With them a run with `rollout.turn_swaps` is a function of its
config: everything else that depends on time changes no bit.
"""

from collections.abc import Sequence
import json
import logging
import pathlib

from stppo_jax.workdir import atomic_files

_log = logging.getLogger(__name__)
# By collection of a step, row, and turn.
Versions = Sequence[Sequence[Sequence[int]]]


class TurnVersions:
  """The files of a host in the folder of a run.

  Args:
    folder: the run's folder.
    host: the number of the host.
  """

  def __init__(self, folder: pathlib.Path, host: int):
    self._folder = folder
    self._suffix = f'-host{host}' if host else ''

  def write(self, step: int, versions: Versions) -> None:
    """Writes the file of a step, in place of an earlier one.

    If that fails, it logs so: the run goes on, and cannot be repeated.

    Args:
      step: the training step, from 0.
      versions: the versions of its turns.
    """
    try:
      atomic_files.replace(self._path(step), json.dumps(versions).encode())
    except OSError as error:
      _log.warning('the run cannot be repeated: %s', error)

  def read(self, step: int) -> Versions | None:
    """Returns what was written of a step; None if there is no such file.

    Raises:
      ValueError: the file is damaged; one line.
    """
    path = self._path(step)
    if not path.exists():
      return None
    try:
      return json.loads(path.read_text('utf-8'))
    except ValueError as error:
      raise ValueError(f'{path}: no JSON: {error}') from error

  def _path(self, step: int) -> pathlib.Path:
    return self._folder / f'versions-{step + 1:06d}{self._suffix}.json'
