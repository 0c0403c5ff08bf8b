"""Tests what holds for the advantages of every estimator."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.configs import defaults
from stppo_jax.rl import advantages
from stppo_jax.rl import estimator_needs
from stppo_jax.rl import masking
from tests.rl import advantage_twins
from tests.rl import batches
from tests.rl import twins

_FIELDS = ('advantages_BL', 'returns_BL', 'value_mask_BL')
_GAE = {'gamma': 0.9, 'lambda_': 0.7, 'gamma_turn': 0.8, 'lambda_turn': 0.6}
_CASES = {name: {} for name in advantages.ADVANTAGES} | {
  'gae': _GAE,
  'gae, turn': {**_GAE, 'steps': 'turn'},
  'gae, bilevel': {**_GAE, 'steps': 'bilevel'},
  'gae, included': {**_GAE, 'observation_tokens': 'included'},
  'decoupled_gae': {'lambda_critic': 0.7, 'alpha': 0.3},
  'decoupled_gae, explained': {'alpha': 0.3, 'baseline': 'explained'},
  'monte_carlo': {'gamma': 0.9},
  'gigpo, history': {'history': 2, 'normalize': 'none'},
}
# Each case is a program to compile. The sums of these are those of others.
_SLOW = (
  *('gae, bilevel', 'decoupled_gae, explained', 'gigpo, history'),
  *('group_centered', 'turn_leave_one_out', 'turn_pooled'),
)


def _parameters(cases):
  return pytest.mark.parametrize(
    'case',
    [
      pytest.param(case, marks=[pytest.mark.slow] if case in _SLOW else [])
      for case in cases
    ],
  )


_EACH = _parameters(_CASES)
# Included observations have advantages, and are read.
_SKIPPING = _parameters(case for case in _CASES if case != 'gae, included')


def _estimate(case, whiten, batch):
  name = case.partition(',')[0]
  options = defaults.choice('advantage', name, **_CASES[case])
  options['whiten'] = whiten
  return advantages.estimate_advantages(
    batch.rewards_BL, batch, num_turns=batches.T, **options
  )


@functools.cache
def _jitted(case):
  def total(arrays, batch):
    batch = batch.replace(**arrays)
    out = {whiten: _estimate(case, whiten, batch) for whiten in masking.WHITENS}
    policy = out['policy']
    weight = jnp.arange(batches.L, dtype=float)[None]
    # Every element of the output is compared: off the mask they must be 0.
    value = jnp.sum(weight * (policy.advantages_BL**2 + policy.returns_BL))
    return value, out

  def run(batch):
    arrays = {'values_BL': batch.values_BL, 'rewards_BL': batch.rewards_BL}
    return jax.value_and_grad(total, has_aux=True)(arrays, batch)

  return jax.jit(run)


@_EACH
def test_failed_row_counts_nowhere_and_rows_may_be_permuted(case):
  batch = batches.grouped()
  order = np.array([4, 2, 0, batches.FAILED_ROW, 5, 1])
  (_, whole), _ = _jitted(case)(batch)
  failed_B = np.arange(batches.B) == batches.FAILED_ROW
  # In a group of its own, it is absent from the one that it was in.
  alone = batch.replace(
    group_ids_B=np.where(failed_B, 99, batch.group_ids_B).astype(np.int32),
    state_ids_BL=np.where(failed_B[:, None], 0, batch.state_ids_BL),
  )
  (_, other), _ = _jitted(case)(batches.rows(alone, order))
  for whiten in ('policy', 'all'):
    for name in _FIELDS:
      whole_BL = np.asarray(getattr(whole[whiten], name))
      np.testing.assert_allclose(
        whole_BL[order], getattr(other[whiten], name), rtol=1e-9, atol=1e-12
      )
      assert not whole_BL[batches.FAILED_ROW].any()


@_SKIPPING
@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_poison_off_the_mask_changes_nothing(case, value):
  batch = batches.grouped()
  (clean, _), clean_gradient = _jitted(case)(batch)
  (poisoned, _), gradient = _jitted(case)(batches.poison(batch, value))
  np.testing.assert_array_equal(poisoned, clean)
  jax.tree.map(np.testing.assert_array_equal, gradient, clean_gradient)
  for array in gradient.values():
    assert np.all(np.isfinite(array))
    assert not np.asarray(array)[~batch.loss_mask_BL].any()


@_SKIPPING
def test_whitening_changes_advantages_only(case):
  batch = batches.grouped()
  mask = batch.loss_mask_BL
  (_, out), _ = _jitted(case)(batch)
  plain, policy, every = (out[whiten] for whiten in ('none', 'policy', 'all'))
  plain_BL = np.asarray(plain.advantages_BL)
  np.testing.assert_allclose(
    policy.advantages_BL, twins.whiten(plain_BL, mask), rtol=1e-9
  )
  # An observation repeats the token before it.
  white_BL = twins.whiten(
    advantage_twins.repeated(plain_BL, mask), advantage_twins.response(mask)
  )
  np.testing.assert_allclose(
    every.advantages_BL, np.where(mask, white_BL, 0), rtol=1e-9
  )
  for white in (policy, every):
    np.testing.assert_array_equal(white.returns_BL, plain.returns_BL)
    np.testing.assert_array_equal(white.value_mask_BL, plain.value_mask_BL)


@_EACH
def test_only_estimators_with_a_critic_read_values(case):
  name, batch = case.partition(',')[0], batches.grouped()
  out = _jitted(case)(batch)[0][1]['none']
  trains = name in estimator_needs.VALUES
  for array in (out.returns_BL, out.value_mask_BL):
    assert np.asarray(array).any() == trains
  if not trains:
    unread = np.full_like(batch.values_BL, np.nan)
    (_, without), _ = _jitted(case)(batch.replace(values_BL=unread))
    without = without['none']
    np.testing.assert_array_equal(without.advantages_BL, out.advantages_BL)


@_EACH
def test_float32_stays_float32(case):
  batch = batches.grouped(dtype=np.float32)
  if case.partition(',')[0] not in estimator_needs.VALUES:
    batch = batch.replace(values_BL=None)
  out = jax.eval_shape(functools.partial(_estimate, case, 'policy'), batch)
  assert out.advantages_BL.dtype == out.returns_BL.dtype == np.float32
