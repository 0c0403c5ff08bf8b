"""The learner: its states, its updates and their layouts."""

import jax
import numpy as np
import pytest

from benchmarks import learners
from stppo_jax.training import checkpoint_state
from tests import compilations
from tests.learner import trees
from tests.training import runs

_WARM_STEPS = 3


@pytest.fixture(scope='module')
def learner():
  config = runs.config(loss__value_warmup_steps=_WARM_STEPS)
  return runs.learner(config)


@pytest.fixture(scope='module')
def packed():
  return runs.packed()


def _stepped(learner, packed, step, *, state=None):
  """Returns the state and the metrics after the updates of a step."""
  state = learner.start() if state is None else state
  batch, _ = learner.annotate(state, packed, reference=learner.reference())
  return learners.update_epochs(learner, state, batch, step)


def _moved(before, after):
  return max(
    np.abs(np.asarray(a) - np.asarray(b)).max()
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after))
  )


def test_only_the_value_model_learns_during_its_warm_up(learner, packed):
  start = jax.device_get(learner.start())
  rested, metrics = _stepped(learner, packed, _WARM_STEPS - 1)
  trees.assert_equal(rested.policy, start.policy)
  assert rested.value.updates == 2
  assert _moved(rested.value.params, start.value.params) > 1e-6
  assert metrics['critic/lr'] > 0
  learned, _ = _stepped(learner, packed, _WARM_STEPS)
  assert learned.policy.updates == 2
  assert _moved(learned.policy.params, start.policy.params) > 1e-6


def test_the_state_is_donated(learner, packed):
  state = learner.start()
  leaves = jax.tree.leaves(state)
  _stepped(learner, packed, 5, state=state)
  assert all(leaf.is_deleted() for leaf in leaves)


def test_a_copied_policy_outlives_the_updates(learner, packed):
  state = learner.start()
  before = jax.device_get(state.policy.params)
  kept = learner.copy_policy(state).trained.policy
  _stepped(learner, packed, 5, state=state)
  trees.assert_equal(kept, before)
  # It has the layout of a restored one: the same program annotates with both.
  assert jax.tree.map(lambda x: x.sharding, kept) == jax.tree.map(
    lambda x: x.sharding, learner.start().policy.params
  )


def test_a_checkpoint_contains_the_published_policies():
  config = runs.config(rollout__steps_ahead=2)
  learner = runs.learner(config)
  abstract = checkpoint_state.abstract_state(learner, learner.start())
  kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.sharding), tree)
  assert kinds(abstract.published) == (kinds(abstract.policy.params),) * 2


def test_another_step_does_not_recompile(learner, packed):
  reference = learner.reference()
  state, _ = _stepped(learner, packed, 0)
  with compilations.counted() as programs:
    batch, _ = learner.annotate(state, packed, reference=reference)
    learners.update_epochs(learner, state, batch, _WARM_STEPS)
  assert not programs


def test_every_epoch_has_its_own_permutation():
  config = runs.config(
    rollout__trajectories_per_step=32,
    updates__minibatch_size=8,
    updates__num_epochs=2,
  )
  learner = runs.learner(config)
  orders = []
  for step in (0, 1):
    minibatches = learner.minibatches(32, step)
    assert [len(rows) for rows in minibatches] == [8] * 8
    for epoch in np.array(minibatches).reshape(2, 32).tolist():
      orders.append(epoch)
      assert sorted(epoch) == list(range(32))
    # More and fewer updates than the epochs of the config have.
    np.testing.assert_array_equal(
      learner.minibatches(32, step, num_updates=9)[:8], minibatches
    )
    np.testing.assert_array_equal(
      learner.minibatches(32, step, num_updates=3), minibatches[:3]
    )
    assert learner.minibatches(32, step, num_updates=0) == []
  assert len(set(map(tuple, orders))) == 4


def test_a_reference_may_be_kept_in_host_memory(learner, packed):
  config = runs.config(model__reference_memory='host')
  other = runs.learner(config)
  on_host = other.reference()
  kinds = lambda tree: {x.sharding.memory_kind for x in jax.tree.leaves(tree)}
  assert kinds(on_host) == {'pinned_host'}
  state = learner.start()
  expected, _ = learner.annotate(state, packed, reference=learner.reference())
  actual, _ = other.annotate(state, packed, reference=on_host)
  trees.assert_equal(actual.ref_logprobs_BL, expected.ref_logprobs_BL)
  assert np.abs(expected.ref_logprobs_BL).max() > 1
  assert kinds(on_host) == {'pinned_host'}  # annotating left it there


def test_annotating_takes_no_more_rows_at_once_than_a_minibatch(learner):
  assert not learner.config.updates.microbatch_size
  sizes = learner.annotate_sizes
  rows = sizes.max_rows * sizes.num_shards
  assert rows == learner.config.updates.minibatch_size
