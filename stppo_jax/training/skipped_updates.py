"""Ends a run whose updates are skipped one after the other.

An update is skipped if its loss, its gradient or its new weights are not
finite, or if the norm of its gradient is above `skip_grad_norm`. One that is
skipped now and then loses a minibatch; many in a row mean that the run learns
nothing any more, and each further step is computed in vain. Then the run ends,
and leaves what is needed to examine the last update:

    WORKDIR/crash/step_12/crash.json       the update, its metrics, a summary of
                                           the state, versions, environment
                         /config.json      the config of the run
                         /batch.npz        the annotated batch of step 12
                         /batch-host1.npz  the rows of another host

A skipped update changes nothing, so the state before it is the one that the run
saves as it ends, if no sound update followed in the step. `tools/replay.py`
makes the update again from both.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
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
from stppo_jax import exits
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.parallel import distributed
from stppo_jax.records import scrubbing
from stppo_jax.rollout import batch_file
from stppo_jax.training import claim
from stppo_jax.training import saving

RECORD, CONFIG = 'crash.json', 'config.json'
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')
_log = logging.getLogger(__name__)
Dump = Callable[[int, Mapping[str, float]], pathlib.Path | None]


class Diverged(exits.RunEnded):
  """Too many updates in a row were skipped."""

  exit_code = exits.ENDED


class SkippedUpdates:
  """Counts the skipped updates since the last one that was done.

  Args:
    limit: the count that ends the run; 0: none does.
  """

  def __init__(self, limit: int):
    self._limit = limit
    self._count = 0

  def check(
    self,
    updates: Sequence[Mapping[str, jax.Array]],
    dump: Dump = lambda update, metrics: None,
  ) -> None:
    """Counts updates by their metrics, the earliest first.

    Args:
      updates: the metrics of the updates of a step.
      dump: called before the run ends, with the number in the step and the
        metrics of the last update, if that one was skipped; writes them down
        and returns the folder.

    Raises:
      Diverged: so many in a row were skipped; the message has the numbers of
        the last one.
    """
    fetched = jax.device_get(updates)
    for metrics in fetched:
      self._count = self._count + 1 if metrics['update/skipped'] else 0
      if self._limit and self._count >= self._limit:
        last = max(n for n, m in enumerate(fetched) if m['update/skipped'])
        metrics, folder = fetched[last], None
        # If others were made after it, the state before it is lost: repeated
        # with the state after the step, it could be sound.
        if last == len(fetched) - 1:
          folder = dump(last, metrics)
        numbers = ', '.join(
          f'{name} {metrics[name]:g}'
          for name in ('actor/grad_norm', 'critic/grad_norm', 'actor/lr')
          if name in metrics
        )
        advice = ''
        if folder is not None:
          advice = f'; python -m stppo_jax replay {folder} repeats the last one'
        raise Diverged(
          f'{self._count} updates in a row were skipped, because the loss, a '
          'gradient or a new weight was not finite or the gradient was above '
          f'skip_grad_norm (the last one: {numbers}): lower the learning rate; '
          f'updates.max_skipped={self._limit} is the limit; 0: no limit{advice}'
        )


def write(
  folder: claim.Folder,
  config,
  learner: learner_lib.Learner,
  batch: batch_lib.TokenBatch,
  kl_coefficient: float,
  last: saving.LastStep,
  update: int,
  metrics: Mapping[str, float],
) -> pathlib.Path | None:
  """Writes the dump of an update of the last step; all hosts call it.

  Args:
    folder: the run's folder, in which it is written.
    config: the config of the run.
    learner: the learner that made the update.
    batch: the annotated batch of the step.
    kl_coefficient: the coefficient of the divergence in the step.
    last: the step, with the state after it.
    update: the number of the update in the step, from 0.
    metrics: the metrics of the update.

  Returns:
    The folder; None if it cannot be written. That is only a warning, so that
    the error which ends the run is still reported.
  """
  hosts, path = folder.hosts, folder.path / 'crash' / f'step_{last.done}'
  minibatches = learner.minibatches(len(batch.lengths_B), last.done - 1)
  # All hosts compute it, before one of them may fail to write.
  leaves = summary(last.state)
  record = {
    'step': last.done,
    'update': update + 1,
    'rows': minibatches[update].tolist(),
    'hosts': hosts.count,
    'kl_coefficient': kl_coefficient,
    'metrics': {name: _number(x) for name, x in metrics.items()},
    'state': leaves,
    'versions': _versions(),
    'devices': [str(device) for device in learner.mesh.devices.flat],
    'environment': scrubbing.environment(os.environ),
  }
  try:
    path.mkdir(parents=True, exist_ok=True)
    local = distributed.to_local_rows(batch)
    fields = {f.name: getattr(local, f.name) for f in dataclasses.fields(local)}
    batch_file.save(
      path / batch_name(hosts.index),
      {name: x for name, x in fields.items() if x is not None},
    )
    if hosts.is_first:
      values = scrubbing.scrubbed_values(config.to_dict())
      text = json.dumps(values, indent=2, sort_keys=True)
      (path / CONFIG).write_text(text + '\n', 'utf-8')
      text = json.dumps(record, indent=2, allow_nan=False)
      (path / RECORD).write_text(text + '\n', 'utf-8')
  except OSError as error:
    _log.warning('cannot write %s: %s', path, error)
    return None
  return path


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
  return versions | {x: importlib.metadata.version(x) for x in _PACKAGES}
