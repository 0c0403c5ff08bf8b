"""Finds the weights that a run starts from: the first of these that exists.

    1  the newest valid checkpoint of the run itself
    2  another run: `init_from`
    3  a Hugging Face directory: `model.path`, or the supervised start
    4  random numbers

If the run has to make its start, the start lies in WORKDIR/start. A supervised
start is a run of its own in that folder, which resumes like any run. With
`init_from`, the newest policy of the other run is copied to that folder with
its tokenizer, and the other run's value model becomes a checkpoint in
WORKDIR/start_value. From then on the other run may go on, move or be deleted.
"""

import dataclasses
import logging
import pathlib
import shutil
from typing import Any, NamedTuple

from stppo_jax import exits
from stppo_jax.learner import state as state_lib
from stppo_jax.learner import weights
from stppo_jax.models import config as model_config
from stppo_jax.models import functional
from stppo_jax.records.checkpoints import checkpoint
from stppo_jax.training import build as build_lib
from stppo_jax.training import checkpoint_state
from stppo_jax.training import claim
from stppo_jax.training import components
from stppo_jax.training import model_files
from stppo_jax.training import run as run_lib
from stppo_jax.training import sft
from stppo_jax.workdir import bucket_files
from stppo_jax.workdir import recorded_config
from stppo_jax.workdir import run_record

_VALUE = 'start_value'
# Keys of `model` that choose implementations and do not change the model.
_CHOICES = ('attention', 'moe', 'cache')
_log = logging.getLogger(__name__)


class Start(NamedTuple):
  """Says where a run's weights come from.

  Attributes:
    config: the config of the run; its section `model` describes the model that
      the run will start from.
    is_missing: whether the run still has to make its start.
    source: the config of the run to copy from; None without such a run.
  """

  config: Any
  is_missing: bool
  source: Any


class Loaded(NamedTuple):
  """The weights before the first step.

  Attributes:
    config: the config of the run; if the run made its start, `model.path` is
      the directory of the start.
    state: the training state with these weights.
    reference: the weights of the frozen reference; None if the state has them.
    number: the number of the source of the weights in the list at the top of
      this module: 2, 3 or 4.
    name: a phrase that names the source, for the line that is printed.
  """

  config: Any
  state: state_lib.TrainState
  reference: functional.Params | None
  number: int
  name: str


def resolve(config, folder: claim.Folder) -> Start:
  """Finds the source of a run's weights, without reading or writing weights.

  With `init_from`, the section `model` of the result describes the model of the
  other run. So a config that does not fit that model is refused before files
  are written.

  Args:
    config: the config of a run.
    folder: the run's folder.

  Raises:
    Misconfigured: `init_from` names no run that has begun, or the policy of
      that run cannot be exported; the message has a line for each reason.
  """
  if not run_record.makes_start(config):
    return Start(config, False, None)
  if not folder.restart and run_record.made_start(folder.path) is not None:
    return Start(run_record.with_start(config, folder.path), False, None)
  if not config.init_from:
    return Start(config, True, None)
  source = _source(config.init_from)
  opened = bucket_files.opened(config.init_from)
  theirs = run_record.with_start(source, opened).model
  config = config.copy_and_resolve_references()
  computes = (*weights.compute_options(config), *_CHOICES)
  fields = [
    field.name for field in dataclasses.fields(model_config.ModelConfig)
  ]
  for key in ('path', 'tokenizer_path', *fields):
    if key in theirs and key not in computes:
      config.model[key] = theirs[key]
  return Start(config, True, source)


def _source(init_from: str) -> Any:
  """Returns the config of the run that `init_from` names."""
  subject = f'config.init_from={init_from}: '
  try:
    source = recorded_config.read(bucket_files.opened(init_from))
    errors = recorded_config.prepare_export(source)
  except (OSError, ValueError) as error:
    errors = [str(error)]
  if errors:
    raise exits.Misconfigured('\n'.join(subject + line for line in errors))
  return source.lock()


def load(
  start: Start, config, parts: build_lib.Parts, folder: claim.Folder
) -> Loaded:
  """Makes the run's start if it is missing, and loads its weights.

  Args:
    start: the result of `resolve`.
    config: the config of the run.
    parts: the objects that were built with `start.config`.
    folder: the run's folder, whose hosts all call this function.

  Raises:
    Misconfigured: the run of `init_from` has no checkpoint, or weights do not
      fit the models of this run.
    OSError: the start cannot be read or written.
    Exceptions of `checkpoint_state.read_policy`.
  """
  # The first host decides whether the start is missing, because it writes the
  # start: on a network file system, other hosts may see the files later.
  is_missing = start.is_missing and run_record.made_start(folder.path) is None
  is_missing, *_ = folder.hosts.exchange('start', is_missing)
  if is_missing and config.init_from:
    with folder.collective_section():
      _copy(config, start.source, folder)
  elif is_missing:
    # The supervised start is a run of its own: at a signal, its last step is
    # saved.
    imitated = config.copy_and_resolve_references()
    # Trackers should not show the start as a separate experiment.
    imitated.writer.update(trackers=(), tensorboard=False)
    with folder.inside('start', imitated, command='sft') as inside:
      inside.record()
      sft.imitate(
        imitated, inside, parts.tokenizer, parts.services, shown_every=50
      )
  # This call waits until the start is complete.
  folder.hosts.exchange('start', True)
  if is_missing:
    folder.publish()
  original, note = config, ''
  config = run_record.with_start(config, folder.path)
  number, name = _origin(original, config.model.path)
  with folder.collective_section(), exits.as_misconfigured():
    state = parts.learner.start(config.model.path)
    if config.init_from and state.value is not None:
      state, note = _with_value(state, folder.path)
    reference = parts.learner.reference(config.model.path)
  return Loaded(config, state, reference, number, name + note)


def _origin(config, path: str) -> tuple[int, str]:
  """Returns the fields `number` and `name` of `Loaded`, for weights in `path`.

  Args:
    config: the config of the run, as the user gave it.
    path: the directory of the weights; '' for random numbers.
  """
  if config.init_from:
    return 2, f'init_from={config.init_from}, kept in {path}'
  if run_record.makes_start(config):
    return 3, f'the supervised start in {path}'
  return run_lib.origin_of(config)


def _copy(config, source: Any, folder: claim.Folder) -> None:
  """Copies the policy and the value model of another run; all hosts call this.

  Args:
    config: the config of this run.
    source: the config of the other run.
    folder: the folder of this run.
  """
  hosts, workdir = folder.hosts, folder.path
  mesh = components.build_mesh(config)
  opened = bucket_files.opened(config.init_from)
  theirs = checkpoint_state.read_policy(source, opened, step=None, mesh=mesh)
  if hosts.is_first:
    # A start that was killed may have left a value model.
    shutil.rmtree(workdir / _VALUE, ignore_errors=True)
    _log.info(
      'init_from=%s: the run starts from the policy of that run after step %d',
      config.init_from,
      theirs.step,
    )
  # This call waits until the first host has removed the old value model.
  hosts.exchange('start', False)
  # The range of values scales the output of the value head. If the runs have
  # different ranges, the same weights would mean other values, so the value
  # model is not copied.
  if theirs.config.loss.value_range == config.loss.value_range:
    _copy_value(theirs, opened, workdir / _VALUE)
  # The policy is exported last, because a start counts as made when its policy
  # exists. The folder of the policy gets its name only when it is complete.
  model_files.export(
    theirs.config,
    workdir / run_record.START,
    theirs.learner.policy,
    theirs.params,
    theirs.tokenizer,
    dtype=weights.TRAINED,
    writes=hosts.is_first,
  )


def _copy_value(
  theirs: checkpoint_state.Policy, source: pathlib.Path, target: pathlib.Path
) -> None:
  """Copies the value model of a run as a checkpoint in the folder `target`.

  Nothing is copied if the run has no separate value model, or if the models
  have adapters: adapters only work together with the frozen weights that they
  were trained with.
  """
  value = theirs.learner.abstract_start()[0].value
  if value is None or theirs.config.model.lora.rank:
    return
  reads = checkpoint.Checkpointer(source, read_only=True)
  try:
    restored = reads.restore_latest(
      value.params, subtree='value.params', step=theirs.step
    )
  except checkpoint.OtherState:
    # With `model.value_path`, the value model may have other sizes than the
    # policy.
    return
  finally:
    reads.close()
  assert restored is not None  # the policy was read from this checkpoint, too
  writes = checkpoint.Checkpointer(target)
  writes.save(0, restored[1], {})
  writes.close()


def _with_value(
  state: state_lib.TrainState, workdir: pathlib.Path
) -> tuple[state_lib.TrainState, str]:
  """Returns the state with the copied value model, if a fitting one exists.

  Args:
    state: the state, whose value model starts from the policy.
    workdir: the run's folder.

  Returns:
    The state, and a note for the line about the start: it is '' if the copied
    value model is used.
  """
  assert state.value is not None  # the caller has checked `state.value`
  folder, restored = workdir / _VALUE, None
  if folder.is_dir():
    reads = checkpoint.Checkpointer(folder, read_only=True)
    try:
      restored = reads.restore_latest(state.value.params)
    except checkpoint.OtherState:
      restored = None
    reads.close()
  if restored is None:
    note = (
      '; that run has no value model that fits, so the value model starts from '
      'the policy'
    )
    return state, note
  value = dataclasses.replace(state.value, params=restored[1])
  return dataclasses.replace(state, value=value), ''
