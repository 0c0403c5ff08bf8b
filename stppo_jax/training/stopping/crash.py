"""Writes what is needed to examine an update that has ended a run.

    WORKDIR/crash/step_12/crash.json       the update, its metrics, a summary of
                                           the state, versions, environment
                         /config.json      the config of the run
                         /batch.npz        the annotated batch of step 12
                         /batch-host1.npz  the rows of another host

A skipped update changes nothing, so the state before it is the one that the run
saves as it ends, if no sound update followed in the step.
`tools/replay.py` makes the update again from both.
"""

from collections.abc import Mapping
import dataclasses
import importlib.metadata
import json
import logging
import math
import os
import pathlib
import platform
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.parallel import distributed
from stppo_jax.records import scrubbing
from stppo_jax.rollout import batch_file
from stppo_jax.training import run as run_lib

RECORD, CONFIG = 'crash.json', 'config.json'
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')
_log = logging.getLogger(__name__)


def write(
  run: run_lib.Run,
  config,
  learner: learner_lib.Learner,
  state: state_lib.TrainState,
  batch: batch_lib.TokenBatch,
  update: int,
  metrics: Mapping[str, float],
  *,
  kl_coefficient: float,
) -> pathlib.Path | None:
  """Writes the dump of an update of the last step; all hosts call it.

  Args:
    run: the run, in whose folder it is written.
    config: the config of the run.
    learner: the learner that made the update.
    state: the state after the step.
    batch: the annotated batch of the step.
    update: the number of the update in the step, from 0.
    metrics: the metrics of the update.
    kl_coefficient: the coefficient of the divergence in the step.

  Returns:
    The folder; None if it cannot be written. That is only a warning, so that
    the error which ends the run is still reported.
  """
  done = run.steps_done
  folder = run.workdir / 'crash' / f'step_{done}'
  minibatches = learner.minibatches(len(batch.lengths_B), done - 1)
  # All hosts compute it, before one of them may fail to write.
  leaves = summary(state)
  record = {
    'step': done,
    'update': update + 1,
    'rows': minibatches[update].tolist(),
    'hosts': run.hosts.count,
    'kl_coefficient': kl_coefficient,
    'metrics': {name: _number(x) for name, x in metrics.items()},
    'state': leaves,
    'versions': _versions(),
    'devices': [str(device) for device in learner.mesh.devices.flat],
    'environment': scrubbing.environment(os.environ),
  }
  try:
    folder.mkdir(parents=True, exist_ok=True)
    local = distributed.to_local_rows(batch)
    fields = {f.name: getattr(local, f.name) for f in dataclasses.fields(local)}
    batch_file.save(
      folder / batch_name(run.hosts.index),
      {name: x for name, x in fields.items() if x is not None},
    )
    if run.hosts.is_first:
      values = scrubbing.scrubbed_values(config.to_dict())
      text = json.dumps(values, indent=2, sort_keys=True)
      (folder / CONFIG).write_text(text + '\n', 'utf-8')
      text = json.dumps(record, indent=2, allow_nan=False)
      (folder / RECORD).write_text(text + '\n', 'utf-8')
  except OSError as error:
    _log.warning('cannot write %s: %s', folder, error)
    return None
  return folder


def batch_name(host: int) -> str:
  """Returns the name of the file with the rows of a host."""
  return f'batch-host{host}.npz' if host else 'batch.npz'


def summary(state: state_lib.TrainState) -> dict[str, dict[str, Any]]:
  """Returns shape, kind and size of the numbers of each leaf of a state."""
  leaves = {
    jax.tree_util.keystr(path, simple=True, separator='.'): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(state)
  }
  numbers = jax.device_get(_measure(list(leaves.values())))
  return {
    name: {
      'shape': list(leaf.shape),
      'dtype': str(leaf.dtype),
      'not_finite': int(not_finite),
      'largest': float(largest),
    }
    for (name, leaf), (not_finite, largest) in zip(leaves.items(), numbers)
  }


# One program for all leaves: many small ones can block each other on several
# devices.
@jax.jit
def _measure(leaves):
  return [
    (
      jnp.sum(~jnp.isfinite(x)),
      jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), initial=0),
    )
    for x in leaves
  ]


def _number(x: Any) -> float | str:
  """Returns a metric in a form that JSON can write."""
  return float(x) if math.isfinite(x) else str(np.float32(x))


def _versions() -> dict[str, str]:
  versions = {'python': sys.version.split()[0], 'system': platform.platform()}
  for name in _PACKAGES:
    versions[name] = importlib.metadata.version(name)
  return versions
