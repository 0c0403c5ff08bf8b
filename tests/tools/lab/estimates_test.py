"""Estimators on saved batches, against plain loops in float64."""

import math

import numpy as np
import pytest

from stppo_jax.configs import defaults
from stppo_jax.rl import estimator_needs
from stppo_jax.tools.lab import estimates
from stppo_jax.tools.lab import saved_batch
from tests.tools.lab import batch_arrays

pytestmark = pytest.mark.usefixtures('double_precision')
_ESTIMATORS = [*defaults.DEFAULTS['advantage']]


def _estimate(arrays, name, **options):
  estimator = estimates.build_estimator(
    defaults.choice('advantage', name, **options)
  )
  needs = estimates.required_arrays(estimator)
  rollouts = batch_arrays.selected(arrays, needs)
  estimates.check(estimator, rollouts)
  return estimates.estimate(estimator, rollouts)


def test_old_values_are_preferred_to_new_ones(tmp_path):
  arrays, *_ = batch_arrays.arrays()

  def metrics(**values):
    np.savez(tmp_path / 'F.npz', **{**arrays, **values})
    return _estimate(saved_batch.load(tmp_path / 'F.npz'), 'gae').metrics

  old_BL = arrays.pop('old_values_BL')
  old, new = metrics(old_values_BL=old_BL), metrics(values_BL=old_BL + 1)
  assert metrics(old_values_BL=old_BL, values_BL=old_BL + 1) == old != new
  assert metrics(old_values_BL=old_BL + 1) == new


def test_groups_are_compared_and_groups_of_one_are_refused():
  arrays, batch, *_ = batch_arrays.arrays()
  mask = batch.loss_mask_BL
  with pytest.raises(ValueError, match='^group_ids_B: some rows must share'):
    _estimate(arrays, 'group_normalized')
  arrays['group_ids_B'] = np.array([5, 5, 5, 5, -9, -9])
  found = _estimate(arrays, 'group_centered')
  totals = np.where(mask, batch.rewards_BL, 0).sum(axis=1)
  expected = np.zeros(len(totals))
  expected[:3] = totals[:3] - totals[:3].mean()  # row 3 has failed
  expected[4:] = totals[4:] - totals[4:].mean()
  expected_BL = np.where(mask, expected[:, None], 0)
  advantages_BL = found.arrays['advantages_BL']
  np.testing.assert_allclose(advantages_BL, expected_BL, atol=1e-12)
  assert not found.arrays['returns_BL'].any()
  assert not found.arrays['value_mask_BL'].any()


@pytest.mark.parametrize(
  'name',
  [
    *_ESTIMATORS[:3],
    *(pytest.param(x, marks=pytest.mark.slow) for x in _ESTIMATORS[3:]),
  ],
)
def test_the_required_arrays_of_an_estimator_suffice(name):
  arrays, batch, *_ = batch_arrays.arrays()
  arrays['state_ids_BL'] = batch.turn_ids_BL
  arrays['group_ids_B'][1] = arrays['group_ids_B'][0]
  estimator = estimates.build_estimator(defaults.choice('advantage', name))
  needs = estimates.required_arrays(estimator)
  assert ('group_ids_B' in needs) == (name in estimator_needs.GROUPS)
  found = _estimate({n: arrays[n] for n in needs}, name)
  assert all(math.isfinite(x) for x in found.metrics.values())


def test_turns_out_of_order_and_missing_values_are_refused():
  arrays, batch, *_ = batch_arrays.arrays()
  mask = batch.loss_mask_BL
  response = {'observation_tokens': 'included', 'whiten': 'all'}
  with pytest.raises(ValueError, match='^old_values_BL: not finite in float6'):
    _estimate(arrays, 'gae', **response)
  fine = arrays | {'old_values_BL': batch.values_BL}
  assert _estimate(fine, 'gae', **response).metrics
  slot = tuple(np.argwhere(mask & (batch.turn_ids_BL == 1))[0])
  arrays['turn_ids_BL'][slot] = 3
  with pytest.raises(ValueError, match='^turn_ids_BL: must not decrease in a'):
    _estimate(arrays, 'gae')


def test_advantages_that_are_too_large_are_refused_and_a_metric_is_not():
  arrays, batch, *_ = batch_arrays.arrays()
  arrays['rewards_BL'] = np.where(batch.loss_mask_BL, 1e200, np.nan)
  found = _estimate(arrays, 'monte_carlo', whiten='none')
  assert found.metrics['advantages/max'] < math.inf
  assert found.metrics['advantages/std'] == math.inf
  arrays['rewards_BL'] = np.where(batch.loss_mask_BL, 1.7e308, np.nan)
  with pytest.raises(saved_batch.NotFinite, match='^advantages_BL: not finite'):
    _estimate(arrays, 'monte_carlo', whiten='none')
