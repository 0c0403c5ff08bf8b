"""Makes an update again that has ended a run, on one CPU device.

The dump of `training/skipped_updates.py` has the batch and the rows of the
minibatch; the state before the update is in the checkpoint that the run saved
as it ended.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax import exits
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.parallel import distributed
from stppo_jax.parallel import sharding
from stppo_jax.records.checkpoints import checkpoint
from stppo_jax.rollout import batch_file
from stppo_jax.training import checkpoint_state
from stppo_jax.training import components
from stppo_jax.training import model_files
from stppo_jax.training import skipped_updates
from stppo_jax.workdir import recorded_config
from stppo_jax.workdir import run_record


def replay(folder: pathlib.Path) -> int:
  """Repeats the update of a dump and prints what is not finite in it.

  Args:
    folder: the dump, WORKDIR/crash/step_N.

  Returns:
    The exit code: 0 if the update is skipped here, as it was in the run.

  Raises:
    Misconfigured: the dump or its checkpoint is missing or damaged.
  """
  with exits.as_misconfigured(str(folder)):
    record = _read(folder)
    config = recorded_config.read(folder)
    arrays = _read_batch(folder, record)
  workdir = folder.absolute().parent.parent
  run_record.check_run(workdir)
  config = _for_one_cpu(run_record.with_start(config, workdir))
  with exits.as_misconfigured():
    learner = _learner(config)
    state = _state(learner, workdir, record['step'])
  learner.kl_coefficient = record['kl_coefficient']
  step, rows = record['step'] - 1, np.asarray(record['rows'], np.int32)
  number, devices = record['update'], ', '.join(record['devices'][:2])
  print(f'update {number} of step {step + 1}, {len(rows)} rows; run: {devices}')
  problems = [*_problems_of_batch(arrays, rows), *_problems_of_state(state)]
  print('\n'.join(problems) or 'batch and state: every number is finite')
  batch = distributed.from_local_rows(
    batch_lib.TokenBatch(**arrays), sharding.batch_sharding(learner.mesh)
  )
  _, outputs = learner.update(state, batch, rows, step)
  metrics = {k: float(x) for k, x in jax.device_get(outputs.metrics).items()}
  for name, here in sorted(metrics.items()):
    then = float(record['metrics'].get(name, 'nan'))
    print(f'{name}: {here:.6g} here, {then:.6g} in the run')
  if metrics['update/skipped'] > 0:
    print('reproduced: the update is skipped here, too')
    return 0
  print('not reproduced: the update is sound here')
  return exits.NOT_REPRODUCED


def _read(folder: pathlib.Path) -> dict[str, Any]:
  """Returns the record of a dump.

  Raises:
    ValueError, OSError: it is missing, or not such a record.
  """
  path = folder / skipped_updates.RECORD
  if not path.is_file():
    dumps = sorted(map(str, folder.glob('crash/step_*')))
    choices = f'; choices: {", ".join(dumps)}' if dumps else ', and has none'
    raise ValueError(f'{folder}: not the dump of an update{choices}')
  text = path.read_text('utf-8')
  kinds = {
    'step': int,
    'update': int,
    'rows': list,
    'hosts': int,
    'kl_coefficient': float,
    'metrics': dict,
    'devices': list,
  }
  try:
    record = json.loads(text)
    is_record = all(isinstance(record[key], kinds[key]) for key in kinds)
  except (ValueError, KeyError, TypeError, RecursionError):
    is_record = False
  if not is_record:
    raise ValueError(f'{path}: not the record of an update')
  return record


def _read_batch(folder: pathlib.Path, record: dict[str, Any]) -> dict[str, Any]:
  """Returns the arrays of a batch, with the rows of all hosts in order.

  Raises:
    ValueError, OSError: a file is missing or damaged.
  """
  names = [f.name for f in dataclasses.fields(batch_lib.TokenBatch)]
  parts = []
  for host in range(record['hosts']):
    path = folder / skipped_updates.batch_name(host)
    try:
      with open(path, 'rb') as file:
        parts.append(batch_file.read(file, names))
    except ValueError as error:
      raise ValueError(f'{path}: {error}') from error
  return {
    name: np.concatenate([part[name] for part in parts]) for name in parts[0]
  }


def _for_one_cpu(config):
  """Returns a config whose programs run on a CPU without other devices."""
  config = config.copy_and_resolve_references()
  config.mesh.data = config.mesh.fsdp = config.mesh.tensor = 1
  config.mesh.collect_fraction = 0.0
  config.rollout.tensor = 0
  config.model.attention = 'auto'
  config.model.reference_memory = 'device'
  return config


def _learner(config) -> learner_lib.Learner:
  questions = components.build_questions(config)
  tokenizer = model_files.build_tokenizer(config, questions)
  mesh = components.build_mesh(config, jax.devices('cpu')[:1])
  shape = model_files.build_model_config(config, tokenizer, mesh)
  return learner_lib.Learner(config, shape, mesh)


def _state(
  learner: learner_lib.Learner, workdir: pathlib.Path, step: int
) -> state_lib.TrainState:
  """Returns the state that the run saved after a step.

  Raises:
    ValueError: there is no such checkpoint; one line.
  """
  with contextlib.closing(
    checkpoint.Checkpointer(workdir, read_only=True)
  ) as checkpoints:
    restored = checkpoint_state.newest(
      checkpoints, learner, learner.start(), step=step
    )
  if restored is None:
    raise ValueError(
      f'{workdir}: the checkpoint of step {step} is gone, and with it the '
      'state before the update'
    )
  return dataclasses.replace(restored[1], published=())


def _problems_of_batch(
  arrays: dict[str, np.ndarray], rows: np.ndarray
) -> Iterator[str]:
  """Yields a line for each array that is not finite in the minibatch."""
  for name, array in arrays.items():
    wrong = np.argwhere(~np.isfinite(array[rows]))
    if len(wrong):
      row, *rest = wrong[0].tolist()
      place = [int(rows[row]), *rest]
      yield f'batch: {name}: {len(wrong)} not finite, the first at {place}'


def _problems_of_state(state: state_lib.TrainState) -> Iterator[str]:
  """Yields a line for each leaf that is not finite."""
  for name, leaf in skipped_updates.summary(state).items():
    if leaf['not_finite']:
      yield f'state: {name}: {leaf["not_finite"]} not finite'
