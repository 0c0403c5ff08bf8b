"""Collects and annotates a batch, updates the models, and saves all arrays.

B trajectories, L tokens. Trajectories are sampled, and annotated with
log-probabilities, values and advantages. Then some updates change the models,
so that ratios differ from 1, and the updated models compute log-probabilities,
entropies and values of the same tokens. The trajectories are the same as in a
step of a run from the same weights, because the random numbers are the same.
"""

import contextlib
import dataclasses
import logging
import pathlib

import jax
import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax import exits
from stppo_jax import streams
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.parallel import compilation
from stppo_jax.parallel import distributed
from stppo_jax.parallel import sharding
from stppo_jax.records.checkpoints import checkpoint
from stppo_jax.rollout import batch_file
from stppo_jax.rollout import pack
from stppo_jax.rollout import steps
from stppo_jax.tools.lab import continuations as continuations_lib
from stppo_jax.tools.lab import saved_batch
from stppo_jax.training import build
from stppo_jax.training import checkpoint_state
from stppo_jax.training import components as components_lib
from stppo_jax.training import engines
from stppo_jax.workdir import run_record

_log = logging.getLogger(__name__)
# Maps a field of a `TokenBatch` to its name in the file, if the names differ.
_NAMES_IN_FILE = {'values_BL': 'old_values_BL'}


def write(
  config,
  out: str,
  *,
  workdir: str | None,
  num_updates: int | None,
  continuations: int = 0,
) -> None:
  """Collects a new saved batch, writes it to a file, and prints its size.

  Args:
    config, workdir, num_updates, continuations: see `collect`.
    out: the path of the file.

  Raises:
    Misconfigured: the file cannot be written.
    Exceptions that `collect` raises.
  """
  with streams.logged(streams.show_beside), compilation.announced():
    arrays = collect(
      config,
      workdir=workdir,
      num_updates=num_updates,
      continuations=continuations,
    )
  with exits.naming(f'--out={out}'):
    batch_file.save(out, arrays)
  mask_BL = arrays['loss_mask_BL']
  print(
    f'{out}: {len(mask_BL)} rows, {arrays["lengths_B"].sum()} tokens, '
    f'{mask_BL.sum()} policy tokens'
  )


def collect(
  config,
  *,
  workdir: str | pathlib.Path | None,
  num_updates: int | None,
  continuations: int = 0,
) -> dict[str, np.ndarray]:
  """Returns the arrays of a new saved batch, see `tools.lab.saved_batch`.

  `values_BL` and `old_values_BL` are in the result only if the algorithm has a
  value model. The ids of sentences and states are always in the result, and so
  is the coefficient of the KL penalty, which an adaptive controller changes
  during a run.

  Args:
    config: the config of a run.
    workdir: the folder of a run, whose newest checkpoint is the policy. The
      folder is not changed. None for the weights that the config starts from.
    num_updates: the number of optimizer steps after annotating; None for as
      many as a step of the run makes.
    continuations: how often each prefix of a trajectory is continued to sample
      the value of the prefix, see `lab.continuations`; 0 for no sampled values.

  Raises:
    Exceptions with an `exit_code`, see `loop.train`.
  """
  # The number of continuations is checked before anything is built: reading
  # data and tokenizer takes a while, and a wrong flag is refused without this
  # wait.
  if continuations:
    slots = components_lib.num_slots(config, 1) // config.rollout.lanes
    is_local = config.rollout.engine == 'local'
    continuations_lib.check(
      config, continuations, slots=slots if is_local else 0
    )
  config = _with_start(config, workdir)
  components = components_lib.build(config)
  tokenizer, learner = components.tokenizer, components.learner
  with components_lib.build_services(config, components.questions) as services:
    with exits.as_misconfigured():
      state = learner.start()
      reference = learner.reference()
    engine = engines.build(
      components.config,
      services,
      tokenizer,
      learner.decoded,
      components.placement,
    )
    collector = engines.build_collector(
      config, services, tokenizer, engine, group_size=config.rollout.group_size
    )
    step = 0
    if workdir is not None:
      step, state = _newest(learner, state, workdir)
    engines.publish(engine, learner, state.params, step)
    step_collector = steps.StepCollector(config, services, collector)
    number = config.rollout.trajectories_per_step
    _log.info(
      f'collecting {number} trajectories with the policy after step {step}'
    )
    trajectories, _ = step_collector.collect(step)
    # Values are sampled here, while the engine has the weights that sampled the
    # dialogues and the services are open. So they are values of the same policy
    # with the same retriever.
    sampled = _sampled_values(
      config, services, tokenizer, engine, trajectories, step, continuations
    )
    engines.release(engine, config)
  packed, _ = build.pack_step(
    trajectories,
    state,
    step,
    config=config,
    tokenizer=tokenizer,
    learner=learner,
    sentences=pack.SentenceSplitter(tokenizer.token_bytes()),
  )
  sentence_ids_BL = np.asarray(packed.sentence_ids_BL)
  if steps.build_sentences(config, tokenizer) is None:
    # A run of this algorithm has no sentence ids. Without them, the batch needs
    # no other compiled programs than those of the run.
    packed = dataclasses.replace(packed, sentence_ids_BL=None)
  _log.info('annotating them')
  batch, _ = learner.annotate(state, packed, reference=reference)
  kl_coefficient = np.asarray(learner.kl_coefficient)
  num_rows, updates = len(batch.lengths_B), config.updates
  if num_updates is None:
    num_updates = updates.num_epochs * num_rows // updates.minibatch_size
  chosen = learner.minibatches(num_rows, step, num_updates=num_updates)
  for number, rows in enumerate(chosen, 1):
    _log.info(f'update {number}')
    state, _ = learner.update(state, batch, rows, step)
  batch = jax.device_get(batch)
  arrays = _arrays(batch) | _updated(learner, state, batch)
  arrays['sentence_ids_BL'] = sentence_ids_BL
  arrays['kl_coefficient'] = kl_coefficient
  if continuations:
    arrays |= continuations_lib.as_arrays(sampled, batch.tokens_BL.shape)
  return {
    name: arrays[name] for name in saved_batch.ARRAY_KINDS if name in arrays
  }


def _sampled_values(
  config, services, tokenizer, engine, trajectories, step, count: int
) -> list[continuations_lib.Sampled]:
  """Returns the sampled values of trajectories; [] if `count` is 0."""
  if not count:
    return []
  environment, tokenizer = continuations_lib.continuing(
    services.environment, tokenizer
  )
  services = dataclasses.replace(services, environment=environment)
  with exits.naming(f'--continuations={count}'):
    collector = engines.build_collector(
      config, services, tokenizer, engine, group_size=count
    )
    return continuations_lib.sample(
      collector, trajectories, count=count, seed=config.seed, step=step
    )


def _with_start(config, workdir):
  """Returns a run's config, which names the weights that the run starts from.

  If the run makes its start weights itself, the `model.path` of the returned
  config is the directory of these weights. Otherwise the config is returned
  unchanged.

  Raises:
    Misconfigured: `workdir` is not the folder of a run of `train`, or the run
      has not made its start weights yet. Or `workdir` is None although a run of
      this config makes its start weights itself.
    CheckpointsMissing: the run has begun, but its checkpoints are missing.
  """
  if workdir is None:
    if run_record.makes_start(config):
      raise exits.Misconfigured(
        '--workdir: missing; a run of this config makes the weights that it '
        'starts from, so give the folder of such a run'
      )
    return config
  workdir = pathlib.Path(workdir)
  run_record.check_run(workdir)
  run_record.check_checkpoints(workdir)
  return run_record.with_start(config, workdir)


def _newest(
  learner: learner_lib.Learner, state: state_lib.TrainState, workdir
) -> tuple[int, state_lib.TrainState]:
  """Returns the number of steps done, and the state of the newest checkpoint.

  Without a checkpoint, the result is 0 and the given state.
  """
  with contextlib.closing(
    checkpoint.Checkpointer(workdir, read_only=True)
  ) as checkpoints:
    restored = checkpoint_state.newest_models(checkpoints, state)
  if restored is None:
    return 0, state
  step, state, host = restored
  # An adaptive controller may have changed the coefficient since the start of
  # the run. This collection uses the coefficient that the run would use now.
  learner.kl_coefficient = host['kl_coefficient']
  return step, state


def _arrays(batch: batch_lib.TokenBatch) -> dict[str, np.ndarray]:
  """Returns the arrays of an annotated batch by their names in the file."""
  arrays = {
    _NAMES_IN_FILE.get(name, name): getattr(batch, name)
    for name in batch.__dataclass_fields__
  }
  return {name: np.asarray(x) for name, x in arrays.items() if x is not None}


def _updated(
  learner: learner_lib.Learner, state: state_lib.TrainState, batch
) -> dict[str, np.ndarray]:
  """Returns the outputs of a state's models for a batch, by array name."""
  tokens_BL, expert_ids = distributed.from_local_rows(
    (batch.tokens_BL, batch.expert_ids), sharding.batch_sharding(learner.mesh)
  )
  outputs = jax.device_get(
    learner.token_outputs(state, tokens_BL, expert_ids=expert_ids)
  )
  arrays = outputs._asdict()
  values = arrays.pop('values')
  if values is not None:
    arrays['values_BL'] = values.values_BL
  return {name: x for name, x in arrays.items() if x is not None}
