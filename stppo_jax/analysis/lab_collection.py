"""One collection, annotated and then updated on, as arrays for the lab.

B trajectories, L tokens. The policy plays, the trainer annotates, and some
updates move the models, so that ratios differ from 1; then the whole
collection is scored again with the models as they have become. What is
collected, and with which random numbers, is what the step of a run would
collect that starts from the same weights.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import pathlib
import sys

import jax
import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax.analysis import saved_batch
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.parallel import distributed
from stppo_jax.parallel import sharding
from stppo_jax.records import checkpoint
from stppo_jax.rollout import pack
from stppo_jax.rollout import sentences
from stppo_jax.training import assembly
from stppo_jax.training import checkpoint_state
from stppo_jax.training import collection
from stppo_jax.training import run_record

# Of a `TokenBatch`, the ones that have another name in the file.
_RENAMED = {'values_BL': 'old_values_BL', 'expert_ids': 'expert_ids_BLNE'}


def collect(
  config, *, workdir: str | pathlib.Path | None, num_updates: int | None
) -> dict[str, np.ndarray]:
  """The arrays of `analysis.saved_batch`.

  Values are there only if the row has a value model, ids of sentences and
  states always, and so is the coefficient of the KL penalty: with an adaptive
  controller nobody else knows it.

  Args:
    config: of a run.
    workdir: of a run whose newest checkpoint plays (it is not changed); None:
      the start of the config.
    num_updates: optimiser steps after annotating; None: as many as the step of
      a run makes.

  Raises:
    Exceptions with an `exit_code`, see `loop.train`.
  """
  config = _with_start(config, workdir)
  parts = assembly.build_components(_one_epoch(config))
  tokenizer, learner = parts.tokenizer, parts.learner
  with assembly.build_services(config, parts.questions) as services:
    with assembly.config_errors():
      state = learner.start()
      reference = learner.reference()
      collector, engine = assembly.build_collector(
        config,
        services,
        tokenizer,
        learner.policy,
        slots=config.rollout.slots or config.rollout.trajectories_per_step,
        group_size=config.rollout.group_size,
      )
    step = 0
    if workdir is not None:
      step, state = _newest(learner, state, workdir)
    engine.publish(learner.merged_params(state), step)
    player = collection.StepCollector(
      config, services, collector, lambda text: print(text, file=sys.stderr)
    )
    trajectories, _ = player.collect(step)
  packed = pack.pack(
    trajectories,
    length_bucket=config.rollout.length_bucket,
    sentences=sentences.SentenceSplitter(tokenizer.token_bytes()),
    with_expert_ids=config.updates.routing_replay == 'sampler',
  )
  annotated, _ = learner.annotate(packed, state, reference)
  kl_coefficient = np.asarray(learner.kl_coefficient)
  batch = jax.device_get(annotated)
  for rows in minibatches(config, len(batch.lengths_B), step, num_updates):
    part = jax.tree.map(lambda x: x[rows], batch)
    state, _ = learner.update_epochs(state, part, step)
  arrays = _arrays(batch) | _updated(learner, state, batch)
  arrays['kl_coefficient'] = kl_coefficient
  return {
    name: arrays[name] for name in saved_batch.ARRAY_KINDS if name in arrays
  }


def _with_start(config, workdir):
  """The config with the weights it starts from.

  Raises:
    Misconfigured: nobody has made them, or there is no such workdir.
  """
  if workdir is None:
    if config.sft.before_training and not config.model.path:
      raise assembly.Misconfigured(
        '--workdir: missing; the start of this config is made by its run'
      )
    return config
  if not pathlib.Path(workdir).is_dir():
    raise assembly.Misconfigured(f'--workdir={workdir}: no such folder')
  return run_record.with_start(config, pathlib.Path(workdir))


def _one_epoch(config):
  """For a learner that is handed one minibatch at a time."""
  config = config.copy_and_resolve_references()
  config.updates.num_epochs = 1
  return config


def _newest(
  learner: learner_lib.Learner, state: state_lib.TrainState, workdir
) -> tuple[int, state_lib.TrainState]:
  """(steps done, state) of the newest checkpoint, or of the start."""
  with contextlib.closing(
    checkpoint.Checkpointer(workdir, read_only=True)
  ) as checkpoints:
    found = checkpoint_state.newest(checkpoints, learner, state)
  if found is None:
    return 0, state
  step, state, host = found
  learner.kl_coefficient = host['kl_coefficient']
  return step, dataclasses.replace(state, published=())


def minibatches(
  config, num_rows: int, step: int, num_updates: int | None
) -> Iterator[np.ndarray]:
  """The row numbers of so many minibatches: those of the step of a run."""
  size = config.updates.minibatch_size
  per_epoch = num_rows // size
  if num_updates is None:
    num_updates = config.updates.num_epochs * per_epoch
  for number in range(num_updates):
    epoch, place = divmod(number, per_epoch)
    generator = np.random.default_rng((config.seed, step, epoch))
    order = generator.permutation(num_rows)
    yield order[place * size : (place + 1) * size]


def _arrays(batch: batch_lib.TokenBatch) -> dict[str, np.ndarray]:
  """The arrays of an annotated batch by the names of the file."""
  named = {
    _RENAMED[name] if name in _RENAMED else name: getattr(batch, name)
    for name in batch.__dataclass_fields__
  }
  return {name: np.asarray(x) for name, x in named.items() if x is not None}


def _updated(
  learner: learner_lib.Learner, state: state_lib.TrainState, batch
) -> dict[str, np.ndarray]:
  """What the models of a state say of a batch."""
  arrays = distributed.from_local_rows(
    (batch.tokens_BL, batch.expert_ids),
    sharding.batch_sharding(learner.mesh),
  )
  scores = jax.device_get(learner.score(state, *arrays))
  return {name: x for name, x in scores._asdict().items() if x is not None}
