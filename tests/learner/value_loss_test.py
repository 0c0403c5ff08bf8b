"""A value model that learns alone, in passes after those of the policy."""

import jax
import numpy as np
import pytest

from stppo_jax.configs import algorithms
from stppo_jax.learner import learner as learner_lib
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
