"""Tests what holds for the advantages of every estimator."""

import functools
from unittest import mock

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

_GAE = {'gamma': 0.9, 'lambda_': 0.7, 'gamma_turn': 0.8, 'lambda_turn': 0.6}
_CASES = {name: {} for name in advantages.ADVANTAGES} | {
  'gae': _GAE,
  'gae, turn': {**_GAE, 'steps': 'turn'},
  'gae, bilevel': {**_GAE, 'steps': 'bilevel'},
  'decoupled_gae': {'lambda_critic': 0.7, 'alpha': 0.3},
  'decoupled_gae, explained': {'alpha': 0.3, 'baseline': 'explained'},
  'monte_carlo': {'gamma': 0.9},
  'gigpo, history': {'history': 2, 'normalize': 'none'},
}
_WHITENS = dict(masking.WHITENS)
# Each case is a program to compile. The sums of these are those of others.
_SLOW = (
  *('gae, bilevel', 'decoupled_gae, explained', 'gigpo, history'),
  *('group_centered', 'turn_leave_one_out', 'turn_pooled'),
)


_EACH = pytest.mark.parametrize(
  'case',
  [
    pytest.param(case, marks=[pytest.mark.slow] if case in _SLOW else [])
    for case in _CASES
  ],
)


def _estimate(case, whiten, batch):
  name = case.partition(',')[0]
  options = defaults.choice('advantage', name, **_CASES[case])
  options['whiten'] = whiten
  return advantages.estimate_advantages(
    batch.rewards_BL, batch, num_turns=batches.T, **options
  )


@functools.cache
def _jitted(case):
  """Returns a function with the number of the whitening as an argument."""

  def total(arrays, batch, number):
    whitened = lambda x, mask: jax.lax.select_n(
      number, *(whiten(x, mask) for whiten in _WHITENS.values())
    )
    with mock.patch.dict(masking.WHITENS, {'any': whitened}):
      out = _estimate(case, 'any', batch.replace(**arrays))
    weight = jnp.arange(batches.L, dtype=float)[None]
    # Every element of the output is compared: off the mask they must be 0.
    return jnp.sum(weight * (out.advantages_BL**2 + out.returns_BL)), out

  def run(batch, number):
    arrays = {'values_BL': batch.values_BL, 'rewards_BL': batch.rewards_BL}
    return jax.value_and_grad(total, has_aux=True)(arrays, batch, number)

  return jax.jit(run)


def _run(case, batch, whiten='none'):
  """Returns the estimates, and the gradient of a number made of them."""
  number = np.int32(list(_WHITENS).index(whiten))
  (_, out), gradient = jax.device_get(_jitted(case)(batch, number))
  return out, gradient


@_EACH
def test_poison_off_the_mask_changes_nothing(case):
  batch = batches.grouped()
  for whiten in _WHITENS:
    clean = _run(case, batch, whiten)
    for value in (np.nan, np.inf):
      poisoned = _run(case, batches.poison(batch, value), whiten)
      jax.tree.map(np.testing.assert_array_equal, poisoned, clean)
    for array in clean[1].values():
      assert np.all(np.isfinite(array))
      assert not array[~batch.loss_mask_BL].any()


@_EACH
def test_whitening_changes_advantages_only(case):
  batch = batches.grouped()
  mask = batch.loss_mask_BL
  plain, policy, every = (
    _run(case, batch, whiten)[0] for whiten in ('none', 'policy', 'all')
  )
  plain_BL = plain.advantages_BL
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
  out, _ = _run(case, batch)
  trains = name in estimator_needs.VALUES
  for array in (out.returns_BL, out.value_mask_BL):
    assert array.any() == trains
  single = batches.grouped(dtype=np.float32)
  if not trains:
    unread = np.full_like(batch.values_BL, np.nan)
    without, _ = _run(case, batch.replace(values_BL=unread))
    np.testing.assert_array_equal(without.advantages_BL, out.advantages_BL)
    single = single.replace(values_BL=None)
  # All this in the precision of the batch.
  out = jax.eval_shape(functools.partial(_estimate, case, 'policy'), single)
  assert out.advantages_BL.dtype == out.returns_BL.dtype == np.float32
