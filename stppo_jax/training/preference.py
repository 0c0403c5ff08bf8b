"""Learning from pairs of trajectories that were collected before.

    for number in range(first, num_updates):
      state, metrics = update(state, reference, minibatch(pairs, number))
      write, checkpoint

No environment and no sampling. Everything an update does is a function of
(config, file, number, state), so the same command resumes from the last
checkpoint as if nothing had happened.
"""

import contextlib
import functools
import math
import pathlib
import time

import jax

from stppo_jax.learner import keys
from stppo_jax.learner import model_roles
from stppo_jax.learner import optimizer as optimizer_lib
from stppo_jax.learner import preference_update
from stppo_jax.learner import state as state_lib
from stppo_jax.learner import weights as weights_lib
from stppo_jax.models import functional
from stppo_jax.parallel import distributed
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from stppo_jax.records import checkpoint
from stppo_jax.records import writer as writer_lib
from stppo_jax.training import assembly
from stppo_jax.training import checkpoint_state
from stppo_jax.training import interruption
from stppo_jax.training import model_files
from stppo_jax.training import pairs as pairs_lib
from stppo_jax.training import run_record

_ADAM = ('b1', 'b2', 'eps')
# Keys that speak of models and are not used here: what they may be all the
# same, which is how it is done here, and the default.
_UNUSED = {
  'model.reference_memory': ('device',),
  'updates.routing_replay': ('nowhere',),
  'loss.load_balance_coefficient': (0.0, 0.001),
}


def prefer(
  config, file: str | pathlib.Path, workdir: str | pathlib.Path
) -> int:
  """Trains, or resumes, on the pairs of a file; exports to `workdir/policy`.

  It starts from model.path (random weights without one); the reference is
  model.reference_path, or that start.

  Args:
    config: of the run; its block `preference` above all.
    file: npz, see `pairs.read`.
    workdir: the run's folder.

  Returns:
    The exit code: 0 done, 130 interrupted and saved, 75 preempted and saved.

  Raises:
    Exceptions with an `exit_code`: a config that does not fit the file, the
    devices or the workdir (2), corrupt checkpoints (3), a checkpoint that
    cannot be saved (75).
  """
  with contextlib.ExitStack() as stack:
    interrupt = stack.enter_context(interruption.Interruption())
    try:
      with interrupt.abandonable():
        run = _Run(config, file, pathlib.Path(workdir))
        stack.callback(run.close)
        run.resume()
    except interruption.Interrupted:
      print('interrupted before the first update; the same command starts anew')
      return interrupt.exit_code
    return run.play(interrupt)


class _Run:
  """The parts of one run, and what an update does with them."""

  def __init__(self, config, file, workdir: pathlib.Path):
    self._config = config
    self._workdir = workdir
    options = config.preference
    with assembly.config_errors():
      _check_used(config)
      self._tokenizer = assembly.build_tokenizer(
        config, assembly.build_questions(config)
      )
      model_files.check(config, self._tokenizer)
      whole, digest = pairs_lib.read(file)
      shape = assembly.build_model_config(config, self._tokenizer)
      mesh = assembly.build_mesh(config)
      _check(config, whole, shape, mesh, file)
      models = model_roles.build(config, shape, mesh, uses_values=False)
      self._trained = models['policy']
      self._policy = self._trained.plain_policy
      optimizer, self._numbers = _optimizer(config)
      make, layout = _fresh(config, self._trained, optimizer, mesh)
      # Resumed with other pairs, it would be a run that no command describes.
      run_record.record_config(
        {**config.to_dict(), 'batch_sha256': digest}, workdir
      )
      load = weights_lib.frozen if self._trained.lora else weights_lib.initial
      start = make(load(config, config.model.path, self._policy, mesh))
      self._state, self._frozen = start.policy, start.frozen
      # Under adapters the base is the reference.
      self._reference = self._frozen
      if self._frozen is None or config.model.reference_path:
        path = config.model.reference_path or config.model.path
        self._reference = weights_lib.frozen(config, path, self._policy, mesh)
    self._pairs = pairs_lib.resized(whole, bucket=config.rollout.length_bucket)
    self._num_updates = options.num_epochs * pairs_lib.updates_per_epoch(
      len(whole.tokens_Q2L), options.batch_size
    )
    self._rows = sharding.batch_sharding(mesh)
    size = options.batch_size
    self._update = jax.jit(
      functools.partial(
        preference_update.update,
        policy=self._trained,
        optimizer=optimizer,
        name=options.name,
        temperature=config.rollout.temperature,
        num_microbatches=size // (options.microbatch_size or size),
      ),
      donate_argnums=0,
      # Pinned, so that a restored state is computed with by the same program.
      out_shardings=(layout.policy, None),
    )
    self._checkpointer = checkpoint.Checkpointer(
      workdir, keep=config.checkpoint.keep
    )
    self._writer = writer_lib.Writer(
      workdir,
      num_steps=self._num_updates,
      tensorboard=config.writer.tensorboard,
      trajectories=0,
    )
    self._done = 0

  def resume(self) -> None:
    """Goes to the newest checkpoint, and forgets what was written after it."""
    found = self._checkpointer.restore_latest(self._state)
    if found is not None:
      self._done, self._state, host = found
      checkpoint_state.check_base(self._done, host, self._frozen)
    self._writer.truncate_after(self._done)

  def close(self) -> None:
    """Ends the display and releases the files."""
    self._writer.close()
    self._checkpointer.close()

  def play(self, interrupt: interruption.Interruption) -> int:
    """Does the remaining updates; the exit code."""
    options = self._config.preference
    self._writer.show(f'{len(self._pairs.tokens_Q2L)} pairs')
    while self._done < self._num_updates:
      if interrupt.exit_code is not None:
        self._save()
        self._writer.show(
          f'interrupted after update {self._done}, saved; '
          'the same command resumes'
        )
        return interrupt.exit_code
      start = time.monotonic()
      batch = pairs_lib.minibatch(
        self._pairs,
        self._done,
        size=options.batch_size,
        seed=self._config.seed,
      )
      self._state, metrics = self._update(
        self._state,
        self._reference,
        distributed.from_local_rows(batch, self._rows),
        self._numbers,
        self._frozen,
      )
      metrics = jax.device_get(metrics)
      metrics['timing_s/step'] = time.monotonic() - start
      self._done += 1
      self._writer.write(self._done, metrics)
      # Last: killed in between, the line is written again, never missing.
      last = self._done == self._num_updates
      if last or self._done % self._config.checkpoint.every == 0:
        self._save()
    self._finish()
    return 0

  def _save(self) -> None:
    host = checkpoint_state.base_record(self._frozen)
    self._checkpointer.save(self._done, self._state, host)

  def _finish(self) -> None:
    policy = self._workdir / 'policy'
    params = self._state.params
    if self._frozen is not None:
      whole = state_lib.join_frozen(self._trained, self._frozen, params)
      params = jax.jit(self._trained.merge_adapters)(whole)
    model_files.export(
      self._config,
      policy,
      self._policy,
      params,
      self._tokenizer,
      dtype=weights_lib.TRAINED,
    )
    self._writer.show(
      f'done. metrics: {self._workdir / "metrics.jsonl"}\n'
      f'policy (Hugging Face format): {policy}'
    )


def _optimizer(config):
  """The optimiser, and the runtime numbers of an update."""
  numbers = config.policy_optimizer.to_dict()
  adam = {name: numbers.pop(name) for name in _ADAM}
  return optimizer_lib.build_optimizer(**adam), {
    'optimizer': {name: float(x) for name, x in numbers.items()},
    'beta': float(config.preference.beta),
    'alpha': float(config.preference.alpha),
  }


def _fresh(config, policy: functional.Model, optimizer, mesh):
  """From weights to the state before the first update, and its layout."""
  key = keys.step_key(config.seed, 0, keys.Purpose.INIT)
  make = functools.partial(
    state_lib.fresh,
    key=jax.random.fold_in(key, 1),
    policy=policy,
    value=None,
    policy_optimizer=optimizer,
    value_optimizer=optimizer,
  )
  weights = jax.eval_shape(policy.plain_policy.init, key)
  layout = sharding.param_shardings(jax.eval_shape(make, weights), mesh)
  return jax.jit(make, donate_argnums=0, out_shardings=layout), layout


def _check_used(config) -> None:
  """Raises ValueError where a key asks for what is not done here."""
  lines = []
  for key, done in _UNUSED.items():
    block, name = key.split('.')
    if config[block][name] not in done:
      lines.append(
        f'{key}={config[block][name]}: must be '
        f'{" or ".join(map(str, done))} for prefer, which does not use it'
      )
  if lines:
    raise ValueError('\n'.join(lines))


def _check(config, whole, shape, mesh, file) -> None:
  """Raises ValueError where file, model and devices do not fit together."""
  if jax.process_count() != 1:
    raise ValueError(
      f'{jax.process_count()} processes: runs of several are not supported'
    )
  shards = math.prod(mesh.shape[axis] for axis in mesh_lib.BATCH_AXES)
  for key in ('batch_size', 'microbatch_size'):
    if config.preference[key] % shards:
      raise ValueError(
        f'preference.{key}={config.preference[key]}: must be a multiple of '
        f'the {shards} devices of the axes data and fsdp'
      )
  low, high = int(whole.tokens_Q2L.min()), int(whole.tokens_Q2L.max())
  if low < 0 or high >= shape.vocab_size:
    raise ValueError(
      f'{file}: tokens_BL has the id {low if low < 0 else high}, which is not '
      f'in the vocabulary of {shape.vocab_size}'
    )
