"""Records which policies wrote the turns of a run, so that it can be repeated.

    WORKDIR/versions-000012.json        versions of step 12 from the first host
           /versions-000012-host3.json  versions of step 12 from host 3

A version is the number of training steps of the policy that wrote a turn. A
file has a list for each collection of the step, with a list of versions for
each row. A run with `rollout.turn_swaps` is a function of its config and these
files: nothing else that depends on timing changes the results, not even in one
bit.
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
# The indices are a collection of a step, a row of the collection, and a turn.
Versions = Sequence[Sequence[Sequence[int]]]


class TurnVersions:
  """Reads and writes a host's files of versions in the folder of a run.

  Args:
    folder: the run's folder.
    host: the index of the host.
  """

  def __init__(self, folder: pathlib.Path, host: int):
    self._folder = folder
    self._suffix = f'-host{host}' if host else ''

  def write(self, step: int, versions: Versions) -> None:
    """Writes the file of a step, and replaces an earlier file.

    If the write fails, the method logs a warning. The run goes on, but it
    cannot be repeated.

    Args:
      step: the training step, from 0.
      versions: the versions of the step's turns.
    """
    try:
      atomic_files.replace(self._path(step), json.dumps(versions).encode())
    except OSError as error:
      _log.warning(
        'cannot record which policies wrote the turns; the run goes on, but '
        'it cannot be repeated: %s',
        error,
      )

  def read(self, step: int) -> Versions | None:
    """Returns the versions of a step, or None if the step has no file.

    Raises:
      ValueError: the file is damaged. The message is one line.
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
  """Returns the files of versions of the run that this run repeats, or None.

  The result is None if `rollout.replay_order` names no run to repeat.

  Args:
    config: the config of this run.
    recorded: the nested config of this run, see `run_record.check_config`.
    host: the index of the host.

  Raises:
    OtherRun: the run to repeat has another config. The message has a line for
      each key that differs.
    Misconfigured: the folder of the run to repeat has no file of the first
      step, or has a damaged file. Also raised if the run to repeat evaluates at
      other steps than this run.
  """
  if not config.rollout.replay_order:
    return None
  path = pathlib.Path(config.rollout.replay_order)
  found = TurnVersions(path, host)
  problem = ''
  with exits.as_misconfigured('rollout.replay_order'):
    # The files of all steps are read now. Otherwise a damaged file would end
    # the run only when the run needs the file.
    first, *_ = [found.read(step) for step in range(config.num_steps)]
  if first is None:
    problem = 'no run with rollout.turn_swaps has begun there'
  else:
    run_record.check_config(recorded, path)
    theirs = json.loads((path / 'config.json').read_text('utf-8'))
    every = theirs['evaluate']['every']
    if config.evaluate.every != every:
      # An evaluation waits for all dialogues. If the two runs evaluated at
      # different steps, some dialogues would wait for weights that are made
      # only after the evaluation.
      problem = (
        f'the run there has evaluate.every={every}, but this run has '
        f'{config.evaluate.every}'
      )
  if problem:
    raise exits.Misconfigured(f'rollout.replay_order={path}: {problem}')
  return found
