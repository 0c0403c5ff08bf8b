"""Microbatches on several cores: the numbers of one program, at one time."""

import functools
import threading

import jax
import numpy as np
import optax
import pytest

from stppo_jax import __main__
from stppo_jax.configs import quickstart
from stppo_jax.learner import cpu_parallel
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import loss
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.rl import diagnostics as diagnostics_lib
from stppo_jax.training import assembly
from tests.learner import updates
from tests.rl import batches
from tests.training import runs

_WHOLE = np.arange(updates.B)


@functools.cache
def _updater(models, num_microbatches=4, num_workers=2):
  return cpu_parallel.Updater(
    loss.Losses(*models, temperature=1.0, num_turns=updates.NUM_TURNS),
    num_microbatches=num_microbatches,
    num_workers=num_workers,
    policy_optimizer=optax.identity(),
    value_optimizer=optax.identity(),
    out_shardings=None,
  )


def _updated(models, algorithm, batch, rows=_WHOLE, **shares):
  state = jax.device_put(updates.state(models))
  state, metrics, diagnostics = _updater(models, **shares).update(
    state, batch, rows, algorithm, updates.NUMBERS, None
  )
  metrics = {name: float(x) for name, x in metrics.items()}
  return updates.Result(
    jax.device_get(state), metrics | diagnostics_lib.summarize(diagnostics)
  )


@pytest.mark.parametrize(
  ('row', 'looks'),
  [
    ('token_ppo', False),
    ('st_ppo', True),  # the scale of its correction is of the minibatch
    ('s_ppo_gradient', False),  # a norm of sums of gradients
    ('grpo', False),  # without a critic
  ],
)
def test_the_numbers_of_one_program(row, looks):
  algorithm = _algorithm(row)
  models = updates.sums() if row != 'grpo' else updates.policy_alone()
  batch = updates.batch(models)
  losses = _updater(models)._losses
  assert losses.looks_first(algorithm, batch) == looks
  expected = updates.update(algorithm, batch, models, num_microbatches=4)
  # What compiles runs by itself, what does not beside: the same bits.
  first, second = (_updated(models, algorithm, batch) for _ in range(2))
  updates.assert_same(first, expected, models)
  jax.tree.map(np.testing.assert_array_equal, first, second)


def _algorithm(row):
  if row == 's_ppo_gradient':
    return batches.algorithm(
      's_ppo', correction__clipping_bias__norm='gradient'
    )
  return batches.algorithm(row)


def test_rows_are_those_of_the_minibatch():
  models, algorithm = updates.sums(), batches.algorithm('st_ppo')
  batch = updates.batch(models)
  rows = _WHOLE[::-2].copy()
  found = _updated(
    models, algorithm, jax.device_put(batch), rows, num_microbatches=2
  )
  expected = updates.update(
    algorithm, updates.rows(batch, rows), models, num_microbatches=2
  )
  updates.assert_same(found, expected, models)


def test_what_a_row_needs_is_found_out_once(monkeypatch):
  models = updates.sums()
  updater = _updater(models)
  asked = []

  def looks_first(losses, algorithm, batch):
    asked.append(algorithm)
    return looks(losses, algorithm, batch)

  looks = loss.Losses.looks_first
  monkeypatch.setattr(loss.Losses, 'looks_first', looks_first)
  monkeypatch.setattr(updater, '_looks', {})
  batch = updates.batch(models)
  rows = [batches.algorithm(name) for name in ('st_ppo', 'token_ppo')]
  found = [updater._looks_first(row, batch) for row in [*rows, *rows]]
  assert found == [True, False, True, False]
  assert len(asked) == 2


def test_the_state_is_consumed():
  models = updates.sums()
  state = jax.device_put(updates.state(models))
  leaves = jax.tree.leaves(state)
  _updater(models).update(
    state,
    updates.batch(models),
    _WHOLE,
    batches.algorithm('token_ppo'),
    updates.NUMBERS,
    None,
  )
  assert all(leaf.is_deleted() for leaf in leaves)


def test_shares_are_computed_at_the_same_time():
  updater = _updater(updates.sums())
  shares = [np.full(1, n) for n in range(2)]
  together = threading.Barrier(2, timeout=30)
  calls = []

  def program(known, share):
    calls.append(share.item())
    if len(calls) > 2:  # the first time, one after the other
      together.wait()
    return known + share.item()

  assert updater._each(program, (10,), shares) == [10, 11]
  assert calls == [0, 1]
  assert updater._each(program, (20,), shares) == [20, 21]


@pytest.mark.parametrize(
  ('cores', 'num_microbatches', 'workers'),
  [(2, 4, 2), (2, 5, 1), (16, 8, 8), (6, 8, 2), (1, 8, 1)],
)
def test_cores_share_microbatches_alike(
  monkeypatch, cores, num_microbatches, workers
):
  monkeypatch.setattr(cpu_parallel, '_cores', lambda: cores)
  assert cpu_parallel.workers(num_microbatches) == workers


@pytest.mark.parametrize(
  ('devices', 'scope', 'shares'),
  [
    (1, 'minibatch', True),
    (1, 'microbatch', False),  # another correction, of other microbatches
    (2, 'minibatch', False),  # devices share the rows already
  ],
)
def test_who_shares_microbatches(monkeypatch, devices, scope, shares):
  monkeypatch.setattr(cpu_parallel, '_cores', lambda: 2)
  config = runs.config(updates__core_rows=2)
  config.algorithm.correction.clipping_bias.scope = scope
  config.mesh.data = devices
  questions = assembly.build_questions(config)
  tokenizer = assembly.build_tokenizer(config, questions)
  shape = assembly.build_model_config(config, tokenizer)
  mesh = mesh_lib.make_mesh(
    data=devices, fsdp=1, tensor=1, devices=jax.devices()[:devices]
  )
  learner = learner_lib.Learner(config, shape, mesh)
  assert (learner._update_minibatch is not learner._update) == shares


def test_a_run_that_is_cut_off_between_updates_is_the_same_run(
  tmp_path, monkeypatch
):
  one = mesh_lib.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
  monkeypatch.setattr(assembly, 'build_mesh', lambda config, local=False: one)
  monkeypatch.setattr(cpu_parallel, '_cores', lambda: 2)
  update, calls = cpu_parallel.Updater.update, []

  def train(name, last=None):
    def cut_off(self, *args):
      calls.append(name)
      if calls.count(name) == last:
        raise RuntimeError('a power cut')
      return update(self, *args)

    monkeypatch.setattr(cpu_parallel.Updater, 'update', cut_off)
    flags = runs.flags(num_steps=2, evaluate__every=0, updates__core_rows=2)
    workdir = tmp_path / name
    return __main__.main(['train', *flags, f'--workdir={workdir}'])

  assert train('whole') == 0 and len(calls) == 2 * 2
  assert train('cut', last=4) == 70  # the last one of the second step
  assert train('cut') == 0 and calls.count('cut') == 4 + 2
  runs.assert_same_told(tmp_path / 'cut', tmp_path / 'whole', num_steps=2)
  weights = 'policy/model.safetensors'
  whole, cut = ((tmp_path / x / weights).read_bytes() for x in ('whole', 'cut'))
  assert whole == cut


def test_the_quickstart_runs_on_many_devices():
  mesh = mesh_lib.make_mesh(data=8, fsdp=1, tensor=1)
  assembly.check_batch_sizes(quickstart.get_config(), mesh)
