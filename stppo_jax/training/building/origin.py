"""Finds the weights that a run starts from: the first of these that there is.

    1  the newest valid checkpoint of the run itself
    2  another run: `init_from`
    3  a Hugging Face directory: `model.path`, or the supervised start
    4  random numbers

Of another run, the newest policy becomes the directory WORKDIR/start, with the
tokenizer of that run, and its value model a checkpoint in WORKDIR/start_value.
Both are made once. From then on the other run may go on, move or be deleted.
"""

import dataclasses
import pathlib
import shutil
from typing import NamedTuple

from stppo_jax.learner import state as state_lib
from stppo_jax.learner import weights
from stppo_jax.models import config as model_config
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.records.checkpoints import checkpoint
from stppo_jax.training.building import assembly
from stppo_jax.training.building import model_files
from stppo_jax.training.building import policy_export
from stppo_jax.workdir import run_record

_VALUE = 'start_value'
# Keys of `model` that say how it is computed, not what it is.
_CHOICES = ('attention', 'moe', 'cache')


class Origin(NamedTuple):
  """The place that the weights of a run come from.

  Attributes:
    number: 1 to 4, see above.
    name: what it is, for the line that is printed.
  """

  number: int
  name: str


def find(config, workdir: pathlib.Path, *, saved: str) -> Origin:
  """Returns the origin of a run's weights.

  Args:
    config: the config of the run, with its start, if it makes one, as the
      model.
    workdir: the run's folder.
    saved: the name of the checkpoint that was restored, such as 'step 3'; '' if
      there was none.
  """
  path = config.model.path
  if saved:
    return Origin(1, f'{saved} of this run')
  if path and pathlib.Path(path) == workdir / 'start':
    if config.init_from:
      return Origin(2, f'init_from={config.init_from}, kept in {path}')
    return Origin(3, f'the supervised start in {path}')
  if path:
    return Origin(3, f'model.path={path}')
  return Origin(4, 'random numbers')


def expected(config, source, workdir: pathlib.Path):
  """Returns the config with the model that it will start from.

  If it starts from another run, the model is described as the copy of that
  run's policy will be. So a config that does not fit it is refused before
  anything is written.

  Args:
    config: the config of a run.
    source: the config of the other run; None if the start was made, or if there
      is no other run.
    workdir: the run's folder.

  Raises:
    Misconfigured: the other run has not begun.
  """
  if not config.init_from:
    return config
  if source is None:
    return run_record.with_start(config, workdir)
  theirs = run_record.with_start(source, pathlib.Path(config.init_from)).model
  config = config.copy_and_resolve_references()
  computes = (*weights.compute_options(config), *_CHOICES)
  fields = [
    field.name for field in dataclasses.fields(model_config.ModelConfig)
  ]
  for key in ('path', 'tokenizer_path', *fields):
    if key in theirs and key not in computes:
      config.model[key] = theirs[key]
  return config


def make_start(
  config, source, workdir: pathlib.Path, hosts: hosts_lib.Hosts
) -> None:
  """Copies policy and value model of another run, unless that was done before.

  Args:
    config: the config of a run.
    source: the config of the other run; not needed if the start was made.
    workdir: the run's folder.
    hosts: the hosts of the run, all of which call this function.

  Raises:
    Misconfigured: the other run has no checkpoint.
    Exceptions of `policy_export.read`, and OSError.
  """
  start = workdir / 'start'
  if not config.init_from:
    return
  # What the first host sees counts, because it writes the start.
  exists, *_ = hosts.exchange('start', start.is_dir())
  if exists:
    return
  assert source is not None  # the start was to be made
  mesh = assembly.build_mesh(config)
  theirs = policy_export.read(source, config.init_from, step=None, mesh=mesh)
  if hosts.is_first:
    shutil.rmtree(workdir / _VALUE, ignore_errors=True)  # of a killed start
    print(
      f'init_from={config.init_from}: its policy after step {theirs.step}',
      flush=True,
    )
  hosts.exchange('start', False)  # what a killed start has left is gone
  _copy_value(theirs, config.init_from, workdir / _VALUE)
  # Last: once it is there, nothing is made again. It gets its name when it is
  # complete.
  model_files.export(
    theirs.config,
    start,
    theirs.learner.policy,
    theirs.params,
    theirs.tokenizer,
    dtype=weights.TRAINED,
    writes=hosts.is_first,
  )
  hosts.exchange('start', True)  # it is there


def _copy_value(
  theirs: policy_export.Policy, source: str, target: pathlib.Path
) -> None:
  """Copies the value model of a run, if it is one of its own without adapters.

  Adapters have no meaning beside other frozen weights.
  """
  value = theirs.learner.abstract_start()[0].value
  if value is None or theirs.config.model.lora.rank:
    return
  reads = checkpoint.Checkpointer(source, read_only=True)
  restored = reads.restore_latest(
    value.params, subtree='value.params', step=theirs.step
  )
  reads.close()
  assert restored is not None  # the policy was in it
  writes = checkpoint.Checkpointer(target)
  writes.save(0, restored[1], {})
  writes.close()


def with_value(
  config, state: state_lib.TrainState, workdir: pathlib.Path
) -> tuple[state_lib.TrainState, str]:
  """Returns the state before the first step with the value model of its start.

  Args:
    config: the config of a run whose start was made.
    state: the state, whose value model starts from the policy.
    workdir: the run's folder.

  Returns:
    The state, and the end of a line if there is no value model that fits.
  """
  if not config.init_from or state.value is None:
    return state, ''
  folder, restored = workdir / _VALUE, None
  if folder.is_dir():
    reads = checkpoint.Checkpointer(folder, read_only=True)
    try:
      restored = reads.restore_latest(state.value.params)
    except checkpoint.OtherState:
      restored = None
    reads.close()
  if restored is None:
    return (
      state,
      '; it has no value model that fits, ours starts from the policy',
    )
  value = dataclasses.replace(state.value, params=restored[1])
  return dataclasses.replace(state, value=value), ''
