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
import jax.numpy as jnp

from stppo_jax.models import functional
from stppo_jax.parallel import distributed
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from stppo_jax.training import assembly
from stppo_jax.training import checkpoint
from stppo_jax.training import interruption
from stppo_jax.training import optimizer as optimizer_lib
from stppo_jax.training import pairs as pairs_lib
from stppo_jax.training import preference_step
from stppo_jax.training import run_record
from stppo_jax.training import state as state_lib
from stppo_jax.training import weights as weights_lib
from stppo_jax.training import writer as writer_lib

_ADAM = ('b1', 'b2', 'eps')


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
    with assembly.misconfigured():
      weights_lib.check(config)
      whole, digest = pairs_lib.read(file)
      self._tokenizer = assembly.build_tokenizer(
        config, assembly.build_questions(config)
      )
      shape = assembly.build_model_config(config, self._tokenizer)
      mesh = assembly.build_mesh(config)
      _check(config, whole, shape, mesh, file)
      # Resumed with other pairs, it would be a run that no command describes.
      run_record.settle({**config.to_dict(), 'batch_sha256': digest}, workdir)
      self._policy = functional.Model(shape, 'vocabulary', mesh)
      params, self._reference = (
        weights_lib.initial(config, path, self._policy, mesh)
        for path in (
          config.model.path,
          config.model.reference_path or config.model.path,
        )
      )
    self._pairs = pairs_lib.resized(whole, bucket=config.rollout.length_bucket)
    self._num_updates = options.num_epochs * pairs_lib.updates_per_epoch(
      len(whole.tokens_P2L), options.batch_size
    )
    numbers = config.policy_optimizer.to_dict()
    adam = {name: numbers.pop(name) for name in _ADAM}
    optimizer = optimizer_lib.build_optimizer(**adam)
    self._numbers = {
      'optimizer': {name: float(x) for name, x in numbers.items()},
      'beta': float(options.beta),
      'alpha': float(options.alpha),
    }
    self._rows = sharding.batch_sharding(mesh)
    self._state, layout = _fresh(params, optimizer, mesh)
    size = options.batch_size
    self._update = jax.jit(
      functools.partial(
        preference_step.update,
        policy=self._policy,
        optimizer=optimizer,
        name=options.name,
        temperature=config.rollout.temperature,
        chunk=options.chunk,
        num_microbatches=size // (options.microbatch_size or size),
      ),
      donate_argnums=0,
      # Pinned, so that a restored state is computed with by the same program.
      out_shardings=(layout, None),
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
      self._done, self._state, _ = found
    self._writer.truncate_after(self._done)

  def close(self) -> None:
    """Ends the display and releases the files."""
    self._writer.close()
    self._checkpointer.close()

  def play(self, interrupt: interruption.Interruption) -> int:
    """Does the remaining updates; the exit code."""
    options = self._config.preference
    self._writer.show(f'{len(self._pairs.tokens_P2L)} pairs')
    while self._done < self._num_updates:
      if interrupt.exit_code is not None:
        self._checkpointer.save(self._done, self._state, {})
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
      )
      metrics = jax.device_get(metrics)
      metrics['timing_s/step'] = time.monotonic() - start
      self._done += 1
      self._writer.write(self._done, metrics)
      # Last: killed in between, the line is written again, never missing.
      last = self._done == self._num_updates
      if last or self._done % self._config.checkpoint.every == 0:
        self._checkpointer.save(self._done, self._state, {})
    self._finish()
    return 0

  def _finish(self) -> None:
    policy = self._workdir / 'policy'
    params = self._state.params
    weights_lib.export(
      self._config, policy, self._policy, params, self._tokenizer
    )
    self._writer.show(
      f'done. metrics: {self._workdir / "metrics.jsonl"}\n'
      f'policy (Hugging Face format): {policy}'
    )


def _fresh(params, optimizer, mesh: jax.sharding.Mesh):
  """The state before the first update, and the layout of its leaves."""
  shapes = jax.eval_shape(optimizer.init, params)
  placed = sharding.param_shardings(shapes, mesh)
  moments = jax.jit(optimizer.init, out_shardings=placed)(params)
  count = jax.device_put(jnp.zeros((), jnp.int32), sharding.replicated(mesh))
  state = state_lib.ModelState(params, moments, count)
  return state, jax.tree.map(lambda leaf: leaf.sharding, state)


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
  low, high = int(whole.tokens_P2L.min()), int(whole.tokens_P2L.max())
  if low < 0 or high >= shape.vocab_size:
    raise ValueError(
      f'{file}: tokens_BL has the id {low if low < 0 else high}, which is not '
      f'in the vocabulary of {shape.vocab_size}'
    )
