"""Microbatches on several cores give the numbers of one program."""

import functools
import os
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from stppo_jax.configs import quickstart
from stppo_jax.learner import cpu_parallel
from stppo_jax.learner import policy_loss
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.training import components
from tests.learner import trees
from tests.learner import updates
from tests.models import tiny
from tests.rl import batches
from tests.training import runs


@functools.cache
def _updater(models, num_workers=2, method=policy_loss.METHOD):
  return cpu_parallel.Updater(
    updates.spec(models),
    method,
    updates.OPTIMIZERS,
    num_workers=num_workers,
    out_shardings=None,
  )


def _update(
  models, algorithm, batch, rows=None, num_workers=2, num_microbatches=4
):
  packed = updates.packed(
    batch, num_microbatches, chosen=rows, num_workers=num_workers
  )
  method = updates.method(algorithm)
  start = jax.device_put(updates.train_state(models))
  state, outputs = _updater(models, num_workers, method).update(
    start,
    {},
    batch,
    packed,
    updates.with_algorithm(updates.HYPERPARAMETERS, algorithm),
  )
  # The state is donated.
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(start))
  return updates.result(state, outputs)


@pytest.mark.parametrize(
  ('name', 'changes'),
  [
    ('st_ppo', {}),  # a statistic of the whole minibatch
    pytest.param(
      's_ppo',
      {'correction__clipping_bias__norm': 'gradient'},
      marks=pytest.mark.slow,
    ),
    # Neither a value model nor a statistic.
    pytest.param('grpo', {}, marks=pytest.mark.slow),
  ],
)
def test_the_numbers_are_those_of_one_program(name, changes):
  algorithm = batches.algorithm(name, **changes)
  models = updates.sums() if name != 'grpo' else updates.policy_alone()
  batch = updates.ragged(models)
  # All rows in one microbatch: that program compiles fastest.
  everywhere = batch.replace(loss_positions_BM=None)
  expected = updates.update(algorithm, everywhere, models)
  # The first call runs the shares one after the other, the second at the same
  # time: the bits are equal.
  first, second = (_update(models, algorithm, batch) for _ in range(2))
  updates.assert_same(first, expected, models)
  trees.assert_equal(first, second)


@pytest.mark.slow
def test_one_worker_gives_the_same_numbers():
  models = updates.transformers(**tiny.MIXTURE)
  algorithm, batch = batches.algorithm('st_ppo'), updates.ragged(models)
  batch = updates.with_visits(batch)  # which a number of the minibatch reads
  result = _update(models, algorithm, batch, num_workers=1)
  updates.assert_same(result, updates.update(algorithm, batch, models), models)


@pytest.mark.slow
def test_only_the_rows_of_the_minibatch_count():
  models, algorithm = updates.sums(), batches.algorithm('st_ppo')
  batch = updates.ragged(models)
  rows = np.arange(updates.B)[::-2].copy()
  result = _update(models, algorithm, jax.device_put(batch), rows)
  expected = updates.update(algorithm, updates.rows(batch, rows), models)
  updates.assert_same(result, expected, models)


@pytest.mark.slow
def test_shares_are_computed_at_the_same_time():
  """Makes each share wait inside its program until the other has begun."""
  together = threading.Barrier(2, timeout=15)
  waits = []

  def wait():
    if waits:
      together.wait()

  hooked = updates.hooked(lambda lengths_B: jax.debug.callback(wait))
  waiting = updates.sums()._replace(policy=hooked.policy)
  algorithm = batches.algorithm('token_ppo')
  batch = updates.batch(updates.sums())
  _update(waiting, algorithm, batch, num_microbatches=2)  # it compiles
  jax.effects_barrier()
  waits.append(True)
  # A thread of XLA may be busy with what another test has left, so one meeting
  # of several is enough. Shares that take turns never meet.
  for _ in range(3):
    together.reset()
    try:
      _update(waiting, algorithm, batch, num_microbatches=2)
      jax.effects_barrier()
      break
    except (jax.errors.JaxRuntimeError, threading.BrokenBarrierError):
      continue
  assert not together.broken


@pytest.mark.parametrize(
  ('devices', 'scope', 'supported'),
  [
    (1, 'minibatch', True),
    (1, 'microbatch', False),  # smaller microbatches, another correction
    (2, 'minibatch', False),  # the mesh splits the rows already
  ],
)
def test_only_one_cpu_device_is_supported(devices, scope, supported):
  algorithm = batches.algorithm(
    'st_ppo', correction__clipping_bias__scope=scope
  )
  mesh = mesh_lib.make_mesh(
    data=devices, fsdp=1, tensor=1, devices=jax.devices()[:devices]
  )
  assert cpu_parallel.is_supported(mesh, algorithm) == supported


@pytest.mark.slow
def test_a_resumed_run_on_one_cpu_device_is_the_same_run(tmp_path):
  environment = os.environ | {'JAX_NUM_CPU_DEVICES': '1'}

  def train(name, num_steps):
    flags = runs.flags(
      num_steps=num_steps,
      evaluate__every=0,
      updates__core_rows=2,
    )
    command = [sys.executable, '-m', 'stppo_jax', 'train', *flags]
    subprocess.run(
      [*command, f'--workdir={tmp_path / name}'],
      cwd=runs.REPO,
      env=environment,
      check=True,
    )

  train('whole', 2)
  train('resumed', 1)
  train('resumed', 2)
  runs.assert_same_files(tmp_path / 'resumed', tmp_path / 'whole', num_steps=2)
  whole, resumed = (
    (tmp_path / name / 'policy' / 'model.safetensors').read_bytes()
    for name in ('whole', 'resumed')
  )
  assert resumed == whole


def test_the_quickstart_runs_on_many_devices():
  mesh = mesh_lib.make_mesh(data=8, fsdp=1, tensor=1)
  config = quickstart.get_config()
  shape = runs.shape(config)
  components.check_sizes(config, shape, mesh, placement=None)
