"""Tests what holds for the advantages of every estimator."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.configs import defaults
from stppo_jax.rl import advantages
from stppo_jax.rl import estimator_needs
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
# Each is a program to compile, and its sums are those of another case.
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


@functools.cache
def _jitted(case, whiten):
  name = case.partition(',')[0]
  options = defaults.choice('advantage', name, **_CASES[case])
  options['whiten'] = whiten
  return jax.jit(
    lambda batch: advantages.estimate_advantages(
      batch.rewards_BL, batch, num_turns=batches.T, **options
    )
  )


@_EACH
@pytest.mark.parametrize(
  'whiten', ['policy', pytest.param('all', marks=pytest.mark.slow)]
)
def test_failed_row_is_an_absent_row_and_rows_may_be_permuted(case, whiten):
  batch = batches.grouped()
  order = np.array([4, 2, 0, 5, 1])  # without the failed row
  whole = _jitted(case, whiten)(batch)
  part = _jitted(case, whiten)(batches.rows(batch, order))
  for name in _FIELDS:
    whole_BL = np.asarray(getattr(whole, name))
    np.testing.assert_allclose(
      whole_BL[order], getattr(part, name), rtol=1e-9, atol=1e-12
    )
    assert not whole_BL[batches.FAILED_ROW].any()


@functools.cache
def _value_and_gradient(case):
  def total(arrays, batch):
    out = _jitted(case, 'policy')(batch.replace(**arrays))
    weight = jnp.arange(batches.L, dtype=float)[None]
    # Every element of the output is compared: off the mask they must be 0.
    return jnp.sum(weight * (out.advantages_BL**2 + out.returns_BL))

  return jax.jit(jax.value_and_grad(total))


@_SKIPPING
@pytest.mark.parametrize(
  'value', [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)]
)
def test_poison_off_the_mask_changes_nothing(case, value):
  def run(batch):
    arrays = {'values_BL': batch.values_BL, 'rewards_BL': batch.rewards_BL}
    return _value_and_gradient(case)(arrays, batch)

  batch = batches.grouped()
  clean, clean_gradient = run(batch)
  poisoned, gradient = run(batches.poison(batch, value))
  np.testing.assert_array_equal(poisoned, clean)
  jax.tree.map(np.testing.assert_array_equal, gradient, clean_gradient)
  for array in gradient.values():
    assert np.all(np.isfinite(array))
    assert not np.asarray(array)[~batch.loss_mask_BL].any()


@_SKIPPING
def test_whitening_changes_advantages_only(case):
  batch = batches.grouped()
  mask = batch.loss_mask_BL
  plain, policy, every = (
    _jitted(case, whiten)(batch) for whiten in ('none', 'policy', 'all')
  )
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
  out = _jitted(case, 'none')(batch)
  trains = name in estimator_needs.VALUES
  assert np.any(out.returns_BL) == np.any(out.value_mask_BL) == trains
  if not trains:
    without = _jitted(case, 'none')(batch.replace(values_BL=None))
    np.testing.assert_array_equal(without.advantages_BL, out.advantages_BL)


@_EACH
def test_float32_stays_float32(case):
  batch = batches.grouped(dtype=np.float32)
  out = jax.eval_shape(_jitted(case, 'policy'), batches.device(batch))
  assert out.advantages_BL.dtype == out.returns_BL.dtype == np.float32
