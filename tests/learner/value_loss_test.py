"""A value model that learns alone, in passes after those of the policy."""

import jax
import numpy as np
import pytest

from stppo_jax.configs import algorithms
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import value_loss
from stppo_jax.models.hf import load
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.rl import estimator_needs
from tests.training import runs

_WITH_VALUES = [
  name
  for name, algorithm in algorithms.ALGORITHMS.items()
  if algorithm['advantage']['name'] in estimator_needs.VALUES
]


def _annotated(learner):
  state = learner.start()
  batch, _ = learner.annotate(
    state, runs.packed(), reference=learner.reference()
  )
  return state, batch


@pytest.mark.slow
@pytest.mark.parametrize('core_rows', [0, 2])
def test_values_learn_alone_as_beside_the_policy(core_rows):
  config = runs.config(updates__core_rows=core_rows)
  mesh = mesh_lib.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
  learner = learner_lib.Learner(config, runs.shape(config), mesh)
  # With rows for each core, another program sums the microbatches.
  assert (learner.sizes.num_workers > 1) == (core_rows > 0)
  state, batch = _annotated(learner)
  rows = learner.minibatches(len(batch.lengths_B), 0)[0]
  start = jax.device_get(state.policy)
  both, update = learner.update(state, batch, rows, 0)
  both = jax.device_get(both)
  alone, of_values = learner.update(
    learner.start(), batch, rows, 0, values_alone=True
  )
  jax.tree.map(np.testing.assert_array_equal, alone.policy, start)
  close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-8)
  jax.tree.map(close, alone.value, both.value)
  assert alone.value.updates == 1
  for name in ('critic/vf_loss', 'critic/grad_norm', 'update/skipped'):
    close(of_values.metrics[name], update.metrics[name])


@pytest.mark.slow
@pytest.mark.parametrize('algorithm', _WITH_VALUES)
def test_values_learn_alone_with_every_algorithm(algorithm):
  config = runs.config(algorithm, updates__value_epochs=1)
  learner = runs.learner(config)
  state, batch = _annotated(learner)
  before = jax.device_get(state)
  further = learner.minibatches(len(batch.lengths_B), 0, values_alone=True)
  state, _ = learner.update(state, batch, further[0], 0, values_alone=True)
  jax.tree.map(np.testing.assert_array_equal, state.policy, before.policy)
  assert state.value.updates == 1


def test_further_passes_follow_those_of_the_policy():
  config = runs.config(updates__num_epochs=2, updates__value_epochs=3)
  learner = runs.learner(config)
  rows = len(runs.packed().lengths_B)
  first = learner.minibatches(rows, 4)
  further = learner.minibatches(rows, 4, values_alone=True)
  per_epoch = rows // config.updates.minibatch_size
  assert len(first) == 2 * per_epoch and len(further) == 3 * per_epoch
  every = learner.minibatches(rows, 4, num_updates=5 * per_epoch)
  np.testing.assert_array_equal([*first, *further], every)


def test_the_warmup_ends_when_the_explained_variance_stops_rising():
  warmup = value_loss.Warmup(steps=9, patience=2)
  explained = [-0.5, 0.1, 0.1, float('nan'), 0.3]
  ends = [warmup.observe(step, x) for step, x in enumerate(explained)]
  # Equal is no rise, and neither is a number that does not exist.
  assert ends == [False, False, False, True, False]
  assert (warmup.end, warmup.best, warmup.best_step) == (3, 0.1, 1)
  patient = value_loss.Warmup(steps=3, patience=0)
  assert not any(patient.observe(step, -step) for step in range(5))
  assert patient.end == 3


@pytest.mark.slow
def test_a_value_model_starts_from_a_directory_of_its_own():
  quickstart = str(runs.REPO / 'assets' / 'quickstart')
  learner = runs.learner(runs.config(model__value_path=quickstart))
  state, batch = _annotated(learner)
  before = jax.device_get(state)
  theirs = runs.learner(runs.config(**_like(quickstart))).start().policy.params
  for name in ('embedding', 'norm', 'layers'):
    equal = np.testing.assert_array_equal
    jax.tree.map(equal, before.value.params[name], theirs[name])
  assert before.policy.params['embedding'].shape[1] == 16  # half as wide
  rows = learner.minibatches(len(batch.lengths_B), 0)[0]
  state, update = learner.update(state, batch, rows, 0)
  # Its head was 0, so that only the head has a gradient.
  assert update.metrics['critic/grad_norm'] > 0
  moved = np.any(state.value.params['scalar_head'] != 0)
  assert moved and state.policy.updates == state.value.updates == 1


def _like(path):
  """Returns changes with which a run has the model of a directory."""
  sizes = load.read_config(path)
  names = ('hidden_size', 'intermediate_size', 'num_layers', 'num_heads')
  names += ('num_kv_heads', 'head_dim')
  return {'model__path': path} | {
    f'model__{name}': getattr(sizes, name) for name in names
  }


@pytest.mark.slow
@pytest.mark.parametrize('backbone', ['own', 'shared'])
def test_values_in_a_range_start_in_its_middle_and_learn(backbone):
  learner = runs.learner(
    runs.config(
      loss__value_range=(-1.0, 3.0),
      model__value_backbone=backbone,
      value_optimizer__warmup_updates=0,
      policy_optimizer__warmup_updates=0,
    )
  )
  state, batch = _annotated(learner)
  values_BL = jax.device_get(batch.values_BL)
  np.testing.assert_array_equal(values_BL[batch.loss_mask_BL], 1.0)
  rows = learner.minibatches(len(batch.lengths_B), 0)[0]
  state, update = learner.update(state, batch, rows, 0)
  # Of two equally likely outcomes, whatever the return is.
  np.testing.assert_allclose(
    update.metrics['critic/vf_loss'], np.log(2), rtol=1e-6
  )
  after, _ = learner.annotate(
    state, runs.packed(), reference=learner.reference()
  )
  assert np.ptp(jax.device_get(after.values_BL)[batch.loss_mask_BL]) > 0
