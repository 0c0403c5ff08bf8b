"""Comparing algorithms: cosines, silenced tokens, and the table."""

import jax
import numpy as np
import pytest

from stppo_jax.tools.lab import comparison
from stppo_jax.tools.lab import lab
from tests.rl import batches
from tests.tools.lab import batch_arrays

_NAMES = ('token_ppo', 'turn_ppo', 'st_ppo')


pytestmark = pytest.mark.usefixtures('double_precision')


def _rollouts(arrays):
  algorithm = batches.algorithm('st_ppo')
  needs = lab.required_arrays(algorithm, entropy_coefficient=0.0)
  return batch_arrays.selected(arrays, needs)


def _compare(arrays, names=_NAMES):
  return comparison.compare(
    {name: (batches.algorithm(name), _rollouts(arrays)) for name in names}
  )


@pytest.fixture(scope='module')
def compared():
  with jax.enable_x64(True):
    arrays, batch, logprobs, _ = batch_arrays.arrays()
    return _compare(arrays), arrays, batch, logprobs


def test_cosines_are_those_of_the_gradients(compared):
  found, arrays, _, _ = compared
  gradients = {}
  for name in _NAMES:
    algorithm, rollouts = batches.algorithm(name), _rollouts(arrays)
    of = lab.loss_and_gradient(algorithm, rollouts, entropy_coefficient=0.0)
    gradients[name] = of.arrays['dloss_dlogprobs_BL']
  for a, x in gradients.items():
    assert found.cosines[a][a] == pytest.approx(1, rel=1e-12)
    for b, y in gradients.items():
      expected = (x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum())
      assert found.cosines[a][b] == pytest.approx(expected, rel=1e-12)
  assert found.cosines['token_ppo']['turn_ppo'] < 0.99
  # A common factor changes no direction.
  assert found.cosines['turn_ppo']['st_ppo'] == pytest.approx(1, rel=1e-12)


def test_a_silenced_token_has_an_advantage_and_no_gradient(compared):
  found, _, batch, logprobs = compared
  mask, advantages = batch.loss_mask_BL, batch.advantages_BL
  ratio = np.exp(logprobs - batch.old_logprobs_BL)
  cut = (ratio > 1.2) & (advantages > 0) | (ratio < 0.8) & (advantages < 0)
  share = (cut & mask).sum() / mask.sum()
  assert found.metrics['token_ppo']['silenced'] == pytest.approx(share)
  assert found.metrics['token_ppo']['actor/pg_clipfrac'] == pytest.approx(share)
  # A token that is cut still moves the ratio of those of its turn.
  turn = found.metrics['turn_ppo']
  assert 0 < turn['silenced'] < turn['actor/pg_clipfrac']


def test_a_token_without_advantage_is_not_silenced():
  arrays, *_ = batch_arrays.arrays()
  arrays['advantages_BL'] = np.zeros_like(arrays['advantages_BL'])
  found = _compare(arrays, ('token_ppo', 'turn_ppo'))
  for name, metrics in found.metrics.items():
    assert metrics['silenced'] == metrics['actor/grad_norm'] == 0
    assert set(found.cosines[name].values()) == {0.0}  # no direction, no NaN


def test_the_smallest_gradients_have_a_direction():
  arrays, *_ = batch_arrays.arrays()
  arrays['advantages_BL'] = arrays['advantages_BL'] * 1e-250
  found = _compare(arrays, ('token_ppo', 'turn_ppo'))
  assert found.cosines['turn_ppo']['turn_ppo'] == pytest.approx(1)
