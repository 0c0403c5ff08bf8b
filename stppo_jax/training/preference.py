"""Trains a policy on pairs of trajectories that were collected before.

There is no environment and no sampling. The result of an update is a function
of (config, file, number of the update, state). So the same command resumes from
the last checkpoint, and the run goes on as if it had not been interrupted.
"""

import functools
import logging
import pathlib

import jax

from stppo_jax import exits
from stppo_jax.learner import model_roles
from stppo_jax.learner import offline_learner
from stppo_jax.learner import offline_losses
from stppo_jax.models import config as model_config
from stppo_jax.parallel import memory
from stppo_jax.rollout import pairs as pairs_lib
from stppo_jax.training import checkpoint_state
from stppo_jax.training import checks
from stppo_jax.training import claim
from stppo_jax.training import components
from stppo_jax.training import model_files
from stppo_jax.training import run as run_lib

_log = logging.getLogger(__name__)
# Config keys that `prefer` does not use. Each key may only have the listed
# values. The first value describes what `prefer` does. The second value, if
# any, is the default of the key.
_UNUSED = {
  'model.reference_memory': ('device',),
  'updates.routing_replay': ('nowhere',),
  'loss.load_balance_coefficient': (0.0, 0.001),
}


def prefer(
  config,
  file: str | pathlib.Path,
  workdir: str | pathlib.Path,
  *,
  restart: bool = False,
) -> int:
  """Trains a policy on the pairs of a file, or resumes; exports the policy.

  The policy starts from `model.path`, or from random weights if `model.path` is
  empty. The reference is read from `model.reference_path`. If that key is
  empty, the reference has the weights that the policy starts from. The policy
  is exported to `workdir/policy`.

  Args:
    config: the config of the run; most options are in its section `preference`.
    file: an npz file, see `pairs.read`.
    workdir: the run's folder.
    restart: whether to begin anew and move the files of the folder aside.

  Returns:
    The exit code: 0 if the run is done, 130 if it was interrupted and saved, 75
    if it was preempted and saved.

  Raises:
    Exceptions with an `exit_code`:
      2: the config does not fit the file, the devices or the workdir.
      3: checkpoints are corrupt or missing.
      75: the workdir is locked, or a checkpoint cannot be saved.
      76: too many updates in a row were skipped.
  """
  options = config.preference
  with exits.as_misconfigured(str(file)):
    pairs, digest = pairs_lib.read(file)
  # The digest of the file is recorded with the config, so that a run is not
  # resumed with other pairs: no single command could repeat such a run.
  with claim.claimed(
    config, workdir, restart=restart, unit='update', batch_sha256=digest
  ) as folder:
    with folder.interruptible(), exits.as_misconfigured():
      _check_unused_keys(config)
      questions = components.build_questions(config)
      tokenizer = model_files.build_tokenizer(config, questions)
      model_files.check(config, tokenizer)
      mesh = components.build_mesh(config)
      shape = model_files.build_model_config(config, tokenizer, mesh)
      _check_sizes(config, pairs, shape, mesh, file)
      # Both trajectories of a pair lie in one row.
      longest = int(pairs.lengths_Q2.sum(axis=1).max())
      learner = build_learner(config, shape, mesh, row_length=longest)
      pairs = pairs_lib.resized(pairs, bucket=config.rollout.length_bucket)
      num_pairs = len(pairs.tokens_Q2L)
      per_epoch = pairs_lib.updates_per_epoch(num_pairs, options.batch_size)
    folder.record()
    # Weights are read last, when all checks of the config have passed.
    with folder.interruptible(), exits.as_misconfigured():
      start = learner.start()
      inputs = offline_losses.PairInputs(
        learner.reference(),
        beta=float(options.beta),
        alpha=float(options.alpha),
      )
    with run_lib.Run.open(
      config,
      folder,
      start,
      checkpoint_state.PolicyCheckpoints(),
      tokenizer,
      num_steps=options.num_epochs * per_epoch,
      unit='update',
    ) as run:
      _log.info('%d pairs', num_pairs)
      skips = checks.SkippedUpdates(config.updates.max_skipped)
      state = run.state
      for number in run.steps():
        with run.phase('step'):
          with folder.interruptible():
            minibatch = pairs_lib.minibatch(
              pairs, number, size=options.batch_size, seed=config.seed
            )
          with run.consuming_state():
            state, metrics = learner.update(state, minibatch, inputs)
            metrics = jax.device_get(metrics)
        run.finish_step(number + 1, state, metrics | run.seconds)
        skips.check(number + 1, [metrics])
      run.finish(learner.policy, learner.merged_params(run.state))
  return folder.exit_code


def build_learner(
  config,
  shape: model_config.ModelConfig,
  mesh: jax.sharding.Mesh,
  *,
  row_length: int,
) -> offline_learner.OfflineLearner:
  """Returns the learner of a run of `prefer`.

  Args:
    config: the config of the run.
    shape: the config of the policy's model.
    mesh: the mesh of training.
    row_length: the number of tokens of the longest pair. Rows have at least
      this number of tokens.
  """
  options = config.preference
  build = functools.partial(
    model_roles.build, config, shape, mesh, uses_values=False
  )
  models = build(gathers_base=config.model.lora.rank > 0)
  # A device holds the gathered base and its shard of the base. The shard is not
  # larger, so room for twice the gathered bytes is enough for both.
  if not memory.leaves_room(mesh, 2 * models.gathered_bytes):
    models = build()
  return offline_learner.OfflineLearner(
    config,
    models,
    offline_losses.tdpo(options.name),
    config.policy_optimizer,
    temperature=config.rollout.temperature,
    row_length=max(row_length, components.row_length(config)),
    microbatch=options.microbatch_size,
  )


def _check_unused_keys(config) -> None:
  """Raises ValueError if a key has a value that `prefer` would ignore."""
  lines = []
  for key, done in _UNUSED.items():
    section, name = key.split('.')
    if config[section][name] not in done:
      lines.append(
        f'{key}={config[section][name]}: must be '
        f'{" or ".join(map(str, done))} for prefer, which does not use it'
      )
  if lines:
    raise ValueError('\n'.join(lines))


def _check_sizes(config, pairs, shape, mesh, file) -> None:
  """Raises ValueError if batch sizes, file, model and devices do not fit."""
  if jax.process_count() != 1:
    raise ValueError(
      f'{jax.process_count()} processes: the command prefer runs in a single '
      'process'
    )
  keys = 'batch_size', 'microbatch_size'
  sizes = {f'preference.{key}': config.preference[key] for key in keys}
  if lines := components.indivisible(sizes, mesh):
    raise ValueError('\n'.join(lines.values()))
  low, high = int(pairs.tokens_Q2L.min()), int(pairs.tokens_Q2L.max())
  if low < 0 or high >= shape.vocab_size:
    raise ValueError(
      f'{file}: tokens_BL has the id {low if low < 0 else high}, which is not '
      f'in the vocabulary of {shape.vocab_size} ids'
    )
