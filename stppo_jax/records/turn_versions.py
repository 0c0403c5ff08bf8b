"""Records which policies wrote the turns of a run, so that it can be repeated.

    WORKDIR/versions-000012.json        those of step 12
           /versions-000012-host3.json  those of another host

A file holds, for each collection of the step, the versions of the turns of each
of its rows. With them a run with `rollout.turn_swaps` is a function of its
config: everything else that depends on time changes no bit.
"""

from collections.abc import Mapping, Sequence
import json
import logging
import pathlib
from typing import Any

from stppo_jax import exits
from stppo_jax.workdir import atomic_files
from stppo_jax.workdir import run_record

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


def repeated(
  config, recorded: Mapping[str, Any], host: int
) -> TurnVersions | None:
  """Returns the record of the run that this one repeats; None: it repeats none.

  Args:
    config: the config of the run.
    recorded: what defines the run, see `run_record.check_config`.
    host: the number of the host.

  Raises:
    OtherRun: that run has another config, with a line for each key.
    Misconfigured: the folder has no such record, or a damaged one.
  """
  if not config.rollout.replay_order:
    return None
  path = pathlib.Path(config.rollout.replay_order)
  found = TurnVersions(path, host)
  problem = ''
  with exits.as_misconfigured('rollout.replay_order'):
    # All of them now: a step that cannot be repeated would end the run later.
    first, *_ = [found.read(step) for step in range(config.num_steps)]
  if first is None:
    problem = 'no run with rollout.turn_swaps has begun there'
  else:
    run_record.check_config(recorded, path)
    theirs = json.loads((path / 'config.json').read_text('utf-8'))
    every = theirs['evaluate']['every']
    if config.evaluate.every != every:
      # An evaluation waits for all dialogues, some of which would wait for
      # weights that come after it.
      problem = f'it has evaluate.every={every}, not {config.evaluate.every}'
  if problem:
    raise exits.Misconfigured(f'rollout.replay_order={path}: {problem}')
  return found
