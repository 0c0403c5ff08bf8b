import functools

import hypothesis
from hypothesis import strategies
import jax
import numpy as np
import pytest

from stppo_jax.configs import defaults
from stppo_jax.rl import advantages
from stppo_jax.rl import estimator_needs
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
  'turn_pooled': {'gamma': GAMMA, 'epsilon': EPSILON},
  'gigpo': {'omega': OMEGA, 'gamma': GAMMA, 'epsilon': EPSILON},
}
TWINS = {
  'group_normalized': lambda batch: advantage_twins.over_rows(batch, EPSILON),
  'group_centered': lambda batch: advantage_twins.over_rows(batch, None),
} | {
  name: functools.partial(getattr(advantage_twins, name), **options)
  for name, options in OPTIONS.items()
  if hasattr(advantage_twins, name)
}
NAMES = pytest.mark.parametrize('name', OPTIONS)


@functools.partial(jax.jit, static_argnames='static')
def _jitted(batch, static, **numbers):
  return advantages.estimate_advantages(
    batch.rewards_BL, batch, num_turns=batches.T, **dict(static), **numbers
  )


def _estimate(batch, name, **changes):
  options = OPTIONS[name] | {'whiten': 'none'} | changes
  options = defaults.choice('advantage', name, **options)
  static = {key: x for key, x in options.items() if isinstance(x, str | int)}
  numbers = {key: x for key, x in options.items() if key not in static}
  out = _jitted(batch, tuple(static.items()), **numbers)
  return np.asarray(out.advantages_BL)


ALONE = 4  # the only row of its group


def _without_turn(number):
  """Returns a batch in which no token of a turn is trained."""
  batch = batches.grouped()
  mask = batch.loss_mask_BL & (batch.turn_ids_BL != number)
  return batch.replace(loss_mask_BL=mask)


@NAMES
def test_estimators_equal_their_twins(name):
  for batch in (batches.grouped(0), batches.grouped(1), _without_turn(2)):
    expected, actual = TWINS[name](batch), _estimate(batch, name)
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)
    assert not actual[expected == 0].any()
    in_groups = np.delete(expected, [ALONE, batches.FAILED_ROW], axis=0)
    assert np.all(np.abs(in_groups).max(axis=1) > 1e-3)
    if name != 'gigpo':  # states recur in a row
      assert not expected[ALONE].any()


# A history of more turns than there are is one of all turns.
@pytest.mark.parametrize('history', [0, 2, 99])
def test_turns_are_compared_by_the_states_before_them(history):
  batch = batches.grouped()
  # The questions have one state at the first turns.
  states = np.where(batch.turn_ids_BL <= 3, 1, batch.state_ids_BL)
  states = np.where(batch.turn_ids_BL > 0, states, 0).astype(np.int32)
  batch = batch.replace(state_ids_BL=states)
  options = {'history': history, 'power': 1.5, 'outcome_weight': 0.5}
  actual = _estimate(batch, 'gigpo', **options)
  expected = TWINS['gigpo'](batch, **options)
  np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)
  if history == 2:
    shorter = TWINS['gigpo'](batch, **options | {'history': 1})
    assert np.abs(actual - shorter).max() > 1e-3


@pytest.mark.parametrize(
  ('name', 'options', 'twin'),
  [
    ('gigpo', {'outcome_counts': 'per_trajectory'}, {'per_turn': False}),
    ('turn_pooled', {'pool': 'separate'}, {'separate': True}),
  ],
)
def test_outcomes_may_count_otherwise(name, options, twin):
  batch = batches.grouped()
  actual = _estimate(batch, name, **options)
  expected = TWINS[name](batch, **twin)
  np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)
  assert np.abs(actual - TWINS[name](batch)).max() > 0.01


def test_every_group_estimator_is_tested_here():
  others = {'gae', 'decoupled_gae', 'monte_carlo'}
  assert advantages.ADVANTAGES.keys() == OPTIONS.keys() | others
  assert estimator_needs.GROUPS == OPTIONS.keys()


@NAMES
def test_equal_rewards_give_exactly_zero_in_float32(name):
  # The mean of three float32 0.1 is not 0.1: (R - mean) / (std + 1e-6) of a
  # rounded mean would be seen.
  turn_ids = np.array([[0, 1, 0, 2], [0, 1, 0, 2], [0, 1, 1, 0]], np.int32)
  batch = batches.rows(batches.make()[0], np.arange(3)).replace(
    group_ids_B=np.array([1, 1, 1], np.int32),
    turn_ids_BL=turn_ids,
    loss_mask_BL=turn_ids > 0,
    # Turns as far from the end share a state.
    state_ids_BL=np.array([[0, 5, 0, 6], [0, 5, 0, 6], [0, 6, 6, 0]], np.int32),
  )
  is_last = np.array([[0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 1, 0]], bool)
  for reward in (0.1, 1 / 3, 1e6 + 0.1):
    batch = batch.replace(rewards_BL=np.where(is_last, np.float32(reward), 0))
    for epsilon in (1e-6, 0.0):
      changes = {'epsilon': epsilon} if 'epsilon' in OPTIONS[name] else {}
      if name == 'turn_leave_one_out':
        changes['gamma'] = 1.0  # a discount would make the rewards unequal
      out = _estimate(batch, name, **changes)
      assert out.dtype == np.float32
      assert not out.any()


@hypothesis.settings(max_examples=15)
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
