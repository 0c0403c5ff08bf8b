import functools

import hypothesis
from hypothesis import strategies
import jax
import numpy as np
import pytest

from stppo_jax.rl import advantages
from stppo_jax.rl import estimator_needs
from stppo_jax.rl import turn_advantages
from tests.rl import advantage_twins
from tests.rl import batches

EPSILON, WEIGHT, OMEGA, GAMMA = 0.1, 0.7, 0.6, 0.8

OPTIONS = {
  'group_normalized': {'epsilon': EPSILON},
  'group_centered': {},
  'leave_one_out': {},
  'turn_group': {'turn_weight': WEIGHT, 'epsilon': EPSILON},
  'turn_leave_one_out': {'gamma': GAMMA},
  'turn_index': {'turn_weight': WEIGHT, 'gamma': GAMMA, 'epsilon': EPSILON},
  'turn_pooled': {'pool': 'joint', 'gamma': GAMMA, 'epsilon': EPSILON},
  'gigpo': {
    'omega': OMEGA,
    'outcome_weight': 1.0,
    'gamma': GAMMA,
    'history': 0,
    'power': 1.0,
    'normalize': 'std',
    'outcome_counts': 'per_turn',
    'epsilon': EPSILON,
  },
}
TWINS = {
  'group_normalized': lambda batch: advantage_twins.over_rows(batch, EPSILON),
  'group_centered': lambda batch: advantage_twins.over_rows(batch, None),
  'leave_one_out': advantage_twins.leave_one_out,
  'turn_group': lambda batch: advantage_twins.turn_group(
    batch, WEIGHT, EPSILON
  ),
  'turn_leave_one_out': lambda batch: advantage_twins.turn_leave_one_out(
    batch, GAMMA
  ),
  'turn_index': lambda batch: advantage_twins.turn_index(
    batch, WEIGHT, GAMMA, EPSILON
  ),
  'turn_pooled': lambda batch: advantage_twins.turn_pooled(
    batch, GAMMA, EPSILON
  ),
  'gigpo': lambda batch: advantage_twins.gigpo(batch, OMEGA, GAMMA, EPSILON),
}
NAMES = pytest.mark.parametrize('name', OPTIONS)


_STATIC = ('normalize', 'outcome_counts', 'history', 'pool')


@functools.partial(jax.jit, static_argnames=('name', 'whiten', 'static'))
def _jitted(batch, name, whiten, static, **options):
  options |= dict(static)
  return advantages.estimate_advantages(
    batch.rewards_BL,
    batch,
    name=name,
    whiten=whiten,
    num_turns=batches.T,
    **options,
  )


def _estimate(batch, name, whiten='none', **changes):
  options = OPTIONS[name] | changes
  static = tuple((key, options.pop(key)) for key in _STATIC if key in options)
  out = _jitted(batch, name, whiten, static, **options)
  return np.asarray(out.advantages_BL)


ALONE = 4  # the only row of its group


@NAMES
@pytest.mark.parametrize('seed', [0, 1])
def test_estimators_equal_their_twins(name, seed):
  batch = batches.grouped(seed)
  expected = TWINS[name](batch)
  np.testing.assert_allclose(
    _estimate(batch, name), expected, rtol=1e-10, atol=1e-12
  )
  in_groups = np.delete(expected, [ALONE, batches.FAILED_ROW], axis=0)
  assert np.all(np.abs(in_groups).max(axis=1) > 1e-3)


def _recurring(seed=0):
  """Returns a batch whose questions have one state at the first turns."""
  batch = batches.grouped(seed)
  first = np.where(batch.turn_ids_BL <= 3, 1, batch.state_ids_BL)
  return batch.replace(
    state_ids_BL=np.where(batch.turn_ids_BL > 0, first, 0).astype(np.int32)
  )


# A history of more turns than there are is one of all turns.
@pytest.mark.parametrize(
  'history', [0, pytest.param(1, marks=pytest.mark.slow), 2, 99]
)
@pytest.mark.parametrize(
  'normalize', ['std', pytest.param('none', marks=pytest.mark.slow)]
)
def test_turns_are_compared_by_the_states_before_them(normalize, history):
  batch = _recurring()
  epsilon = EPSILON if normalize == 'std' else None
  options = {'history': history, 'power': 1.5, 'outcome_weight': 0.5}
  actual = _estimate(batch, 'gigpo', normalize=normalize, **options)
  expected = advantage_twins.gigpo(batch, OMEGA, GAMMA, epsilon, **options)
  np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)
  if history in (1, 2):
    options['history'] -= 1
    shorter = advantage_twins.gigpo(batch, OMEGA, GAMMA, epsilon, **options)
    assert np.abs(actual - shorter).max() > 1e-3


@pytest.mark.parametrize('normalize', ['std', 'none'])
def test_outcomes_of_gigpo_may_count_once_a_trajectory(normalize):
  batch = batches.grouped()
  actual = _estimate(
    batch, 'gigpo', normalize=normalize, outcome_counts='per_trajectory'
  )
  epsilon = EPSILON if normalize == 'std' else None
  expected = advantage_twins.gigpo(batch, OMEGA, GAMMA, epsilon, per_turn=False)
  np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)
  per_turn = advantage_twins.gigpo(batch, OMEGA, GAMMA, epsilon)
  assert np.abs(actual - per_turn).max() > 0.01


def test_outcomes_may_be_compared_with_outcomes_alone():
  batch = batches.grouped()
  actual = _estimate(batch, 'turn_pooled', pool='separate')
  expected = advantage_twins.turn_pooled(batch, GAMMA, EPSILON, separate=True)
  np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)
  assert np.abs(actual - _estimate(batch, 'turn_pooled')).max() > 0.01


def test_the_reward_of_a_turn_is_compared_with_turns_of_its_number():
  batch = batches.grouped()
  found = jax.jit(turn_advantages.turn_z, static_argnames='num_turns')(
    batch.rewards_BL, batch, num_turns=batches.T
  )
  expected = np.zeros(batch.loss_mask_BL.shape)
  for (b, k), z in advantage_twins.turn_z(batch, 1e-6).items():
    expected[b, batch.turn_ids_BL[b] == k] = z
  mask = batch.loss_mask_BL
  np.testing.assert_allclose(
    np.asarray(found)[mask], expected[mask], atol=1e-12
  )
  assert (np.abs(expected[mask]) > 0.1).sum() > 10


def _three_rows(dtype=np.float64):
  """Returns one question with rewards 3, 0, 0.

  The second row has the turn rewards 1 and -1.
  """
  turn_ids = np.array([[0, 1, 0, 2], [0, 1, 0, 2], [0, 1, 1, 0]], np.int32)
  rewards = np.array([[9, 0, 9, 3], [9, 1, 9, -1], [9, 0, 0, 9]], dtype)
  states = np.array([[0, 5, 0, 6], [0, 5, 0, 8], [0, 5, 5, 0]], np.int32)
  return batches.rows(batches.make()[0], np.arange(3)).replace(
    rewards_BL=rewards,
    group_ids_B=np.array([1, 1, 1], np.int32),
    turn_ids_BL=turn_ids,
    loss_mask_BL=turn_ids > 0,
    state_ids_BL=states,
  )


def test_every_group_estimator_is_tested_here():
  others = {'gae', 'decoupled_gae', 'monte_carlo'}
  assert advantages.ADVANTAGES.keys() == OPTIONS.keys() | others
  assert estimator_needs.GROUPS == OPTIONS.keys()


@NAMES
def test_a_group_of_one_gives_zero(name):
  batch = batches.grouped()
  batch = batch.replace(
    group_ids_B=np.arange(batches.B, dtype=np.int32),
    # No two turns share a state.
    state_ids_BL=batch.turn_ids_BL
    + 10 * np.arange(batches.B, dtype=np.int32)[:, None],
  )
  assert not _estimate(batch, name).any()
  if name == 'group_centered':  # whitening is the same for all
    assert not _estimate(batch, name, 'all').any()


@NAMES
@pytest.mark.parametrize('epsilon', [1e-6, 0.0])
@pytest.mark.parametrize('reward', [0.1, 1 / 3, 1e6 + 0.1])
def test_equal_rewards_give_exactly_zero_in_float32(name, epsilon, reward):
  # The mean of three float32 0.1 is not 0.1: (R - mean) / (std + 1e-6) of a
  # rounded mean would be seen.
  batch = _three_rows(np.float32)
  rewards = np.zeros(batch.rewards_BL.shape, np.float32)
  last = np.array([3, 3, 2])
  rewards[np.arange(3), last] = reward
  batch = batch.replace(
    rewards_BL=rewards,
    # Turns as far from the end share a state.
    state_ids_BL=np.array([[0, 5, 0, 6], [0, 5, 0, 6], [0, 6, 6, 0]], np.int32),
  )
  changes = {'epsilon': epsilon} if 'epsilon' in OPTIONS[name] else {}
  if name == 'turn_leave_one_out':
    changes['gamma'] = 1.0  # a discount would make the rewards unequal
  out = _estimate(batch, name, **changes)
  assert out.dtype == np.float32
  assert not out.any()


@pytest.mark.parametrize('name', sorted(estimator_needs.TURNS))
def test_a_turn_with_no_trained_token_takes_no_time(name):
  batch = batches.grouped()
  mask = batch.loss_mask_BL & (batch.turn_ids_BL != 2)
  batch = batch.replace(loss_mask_BL=mask)
  np.testing.assert_allclose(
    _estimate(batch, name), TWINS[name](batch), rtol=1e-10, atol=1e-12
  )


@hypothesis.settings(
  max_examples=15,
  deadline=None,
  derandomize=True,
  database=None,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
  name=strategies.sampled_from(list(OPTIONS)),
  groups=strategies.lists(
    strategies.integers(0, 3), min_size=batches.B, max_size=batches.B
  ),
  rewards=strategies.lists(
    strategies.sampled_from([0.0, 0.1, 1.0]),
    min_size=batches.B,
    max_size=batches.B,
  ),
  failed=strategies.sets(strategies.integers(0, batches.B - 1)),
  order=strategies.permutations(range(batches.B)),
  names_of_groups=strategies.permutations([-3, 0, 5, 2**30]),
)
def test_properties_hold_for_any_groups(
  name, groups, rewards, failed, order, names_of_groups
):
  batch = batches.grouped()
  mask = batch.turn_ids_BL > 0
  mask[list(failed)] = False
  last = np.zeros_like(mask)
  for b in set(range(batches.B)) - failed:
    last[b, np.flatnonzero(mask[b])[-1]] = True
  batch = batch.replace(
    loss_mask_BL=mask,
    rewards_BL=np.where(last, np.asarray(rewards)[:, None], 0.0),
    group_ids_B=np.asarray(groups, np.int32),
  )
  out = _estimate(batch, name)
  np.testing.assert_allclose(out, TWINS[name](batch), atol=1e-9)

  renamed = np.asarray(names_of_groups)[np.asarray(groups)]
  other = batch.replace(group_ids_B=renamed.astype(np.int32))
  np.testing.assert_array_equal(_estimate(other, name), out)

  permuted = _estimate(batches.rows(batch, np.asarray(order)), name)
  np.testing.assert_allclose(permuted, out[np.asarray(order)], atol=1e-12)
