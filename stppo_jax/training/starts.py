"""Finds the weights that a run starts from: the first of these that exists.

    1  the newest valid checkpoint of the run itself
    2  another run: `init_from`
    3  a Hugging Face directory: `model.path`, or the supervised start
    4  random numbers

A start that has to be made lies in WORKDIR/start. The supervised start is a run
of its own there, which resumes like any other. Of another run, the newest
policy is copied, with its tokenizer, and its value model becomes a checkpoint
in WORKDIR/start_value. From then on the other run may go on, move or be
deleted.
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
# Keys of `model` that say how it is computed, not what it is.
_CHOICES = ('attention', 'moe', 'cache')
_log = logging.getLogger(__name__)


class Start(NamedTuple):
  """The start of a run, which may have to be made yet.

  Attributes:
    config: the config of the run, with the model that it will start from.
    is_missing: whether it has to be made.
    source: the config of the run to copy from; None if there is none.
  """

  config: Any
  is_missing: bool
  source: Any


class Loaded(NamedTuple):
  """The weights before the first step.

  Attributes:
    config: the config of the run; its section `model` names the start.
    state: the state.
    reference: weights of the frozen reference; None if the state has them.
    number: 2, 3 or 4: the number in the list of the module's docstring.
    name: what they are, for the line that is printed.
  """

  config: Any
  state: state_lib.TrainState
  reference: functional.Params | None
  number: int
  name: str


def resolve(config, folder: claim.Folder) -> Start:
  """Returns what a run starts from; no weight is read, and nothing is made.

  If it is another run, the model is described as the copy of that run's policy
  will be. So a config that does not fit it is refused before anything is
  written.

  Args:
    config: the config of a run.
    folder: its folder.

  Raises:
    Misconfigured: `init_from` is no run that has begun, or its policy cannot be
      exported; a line for each reason.
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
  """Makes the start, unless that was done before, and loads it.

  Args:
    start: from `resolve`.
    config: the config of the run.
    parts: from `build`, of the start's config.
    folder: the run's folder, whose hosts all call this function.

  Raises:
    Misconfigured: the other run has no checkpoint, or weights do not fit.
    Exceptions of `checkpoint_state.read_policy`, and OSError.
  """
  # What the first host sees counts, because it writes the start: on a network
  # file system others may see it later.
  is_missing = start.is_missing and run_record.made_start(folder.path) is None
  is_missing, *_ = folder.hosts.exchange('start', is_missing)
  if is_missing and config.init_from:
    with folder.collective_section():
      _copy(config, start.source, folder)
  elif is_missing:
    # A run of its own: a signal finishes and saves its step.
    imitated = config.copy_and_resolve_references()
    # A tracker should not show the start as an experiment of its own.
    imitated.writer.update(trackers=(), tensorboard=False)
    with folder.inside('start', imitated, command='sft') as inside:
      inside.record()
      sft.imitate(
        imitated, inside, parts.tokenizer, parts.services, shown_every=50
      )
  folder.hosts.exchange('start', True)  # on all hosts, the start is there now
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
  """Returns the number and the name of a start whose weights are in `path`."""
  if config.init_from:
    return 2, f'init_from={config.init_from}, kept in {path}'
  if run_record.makes_start(config):
    return 3, f'the supervised start in {path}'
  return run_lib.origin_of(config)


def _copy(config, source: Any, folder: claim.Folder) -> None:
  """Copies policy and value model of another run; all hosts call it."""
  hosts, workdir = folder.hosts, folder.path
  mesh = components.build_mesh(config)
  opened = bucket_files.opened(config.init_from)
  theirs = checkpoint_state.read_policy(source, opened, step=None, mesh=mesh)
  if hosts.is_first:
    shutil.rmtree(workdir / _VALUE, ignore_errors=True)  # of a killed start
    _log.info(
      'init_from=%s: its policy after step %d', config.init_from, theirs.step
    )
  hosts.exchange('start', False)  # what a killed start has left is gone
  # With another range of values, the same weights of the head would mean other
  # values, so the value model is not copied then.
  if theirs.config.loss.value_range == config.loss.value_range:
    _copy_value(theirs, opened, workdir / _VALUE)
  # The policy is exported last, because a start whose policy is there is not
  # made again. The folder gets its name only when it is complete.
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
  """Copies the value model of a run if it is separate and has no adapters.

  Adapters have no meaning beside other frozen weights.
  """
  value = theirs.learner.abstract_start()[0].value
  if value is None or theirs.config.model.lora.rank:
    return
  reads = checkpoint.Checkpointer(source, read_only=True)
  try:
    restored = reads.restore_latest(
      value.params, subtree='value.params', step=theirs.step
    )
  except checkpoint.OtherState:  # one of another size, see model.value_path
    return
  finally:
    reads.close()
  assert restored is not None  # the policy was in it
  writes = checkpoint.Checkpointer(target)
  writes.save(0, restored[1], {})
  writes.close()


def _with_value(
  state: state_lib.TrainState, workdir: pathlib.Path
) -> tuple[state_lib.TrainState, str]:
  """Returns the state with the value model that was copied, if it fits.

  Args:
    state: the state, whose value model starts from the policy.
    workdir: the run's folder.

  Returns:
    The state, and the end of a line if there is no value model that fits.
  """
  assert state.value is not None  # there is one to replace
  folder, restored = workdir / _VALUE, None
  if folder.is_dir():
    reads = checkpoint.Checkpointer(folder, read_only=True)
    try:
      restored = reads.restore_latest(state.value.params)
    except checkpoint.OtherState:
      restored = None
    reads.close()
  if restored is None:
    note = '; it has no value model that fits, ours starts from the policy'
    return state, note
  value = dataclasses.replace(state.value, params=restored[1])
  return dataclasses.replace(state, value=value), ''
