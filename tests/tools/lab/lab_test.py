"""Algorithms on saved batches, against plain loops in float64."""

import math

import numpy as np
import pytest

from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.tools.lab import lab
from stppo_jax.tools.lab import saved_batch
from tests.rl import advantage_twins
from tests.rl import batches
from tests.rl import loss_twin
from tests.rl import twins
from tests.tools.lab import batch_arrays

_ENTROPY = 0.01
_TAU = 'correction__clipping_bias__tau'
_NORM = 'correction__clipping_bias__norm'
# With these, an algorithm reads every array that it can read.
_EVERY_ARRAY = {
  'correction__names': ('clipping_bias', 'tis'),
  'kl__where': 'loss',
  'kl__coefficient': 0.3,
}


pytestmark = pytest.mark.usefixtures('double_precision')


def _select(arrays, algorithm, coefficient=_ENTROPY):
  needs = lab.required_arrays(algorithm, entropy_coefficient=coefficient)
  more, problems = saved_batch.select_optional(
    arrays, lab.OPTIONAL_ARRAYS, dtype=np.float64
  )
  assert not problems
  return batch_arrays.selected(arrays, needs) | more


def _score(arrays, row, coefficient=_ENTROPY):
  algorithm = algorithm_lib.build_algorithm(row)
  rollouts = _select(arrays, algorithm, coefficient)
  return lab.loss_and_gradient(
    algorithm, rollouts, entropy_coefficient=coefficient
  )


@pytest.mark.parametrize(
  ('name', 'changes', 'poison'),
  [
    pytest.param('st_ppo', {_TAU: 1.1}, np.nan, marks=pytest.mark.slow),
    ('sspo', _EVERY_ARRAY, np.inf),
  ],
)
def test_loss_and_gradient_are_those_of_the_plain_loops(name, changes, poison):
  row = batches.algorithm_options(name, **changes)
  arrays, batch, logprobs, entropy = batch_arrays.arrays(poison=poison)
  found = _score(arrays, row)
  twin = loss_twin.policy_loss(row, logprobs, entropy, batch, _ENTROPY)
  assert found.metrics['loss'] == pytest.approx(twin.loss, rel=1e-12)
  assert found.arrays['loss'] == found.metrics['loss']
  mask = batch.loss_mask_BL
  level = row['ratio']['level']
  ratio = twins.ratios(logprobs, batch.old_logprobs_BL, batch, level)
  for key, expected in (
    ('ratio_BL', ratio),
    ('weights_BL', twin.scales),
    ('clipped_BL', twin.cut),
  ):
    np.testing.assert_allclose(found.arrays[key], expected, rtol=1e-12)
  assert found.metrics['actor/pg_clipfrac'] == twin.cut[mask].mean()
  gradient = found.arrays['dloss_dlogprobs_BL']
  np.testing.assert_array_equal(gradient[~mask], 0)
  slots = np.argwhere(mask)[::3]

  def loss(x):
    rest = entropy, batch, _ENTROPY
    return loss_twin.policy_loss(row, x, *rest, frozen=logprobs).loss

  differences = twins.differences(loss, logprobs, slots)
  at = tuple(slots.T)
  np.testing.assert_allclose(gradient[at], differences[at], atol=1e-8)
  norm = math.sqrt((gradient**2).sum())
  assert found.metrics['actor/grad_norm'] == pytest.approx(norm, rel=1e-12)


@pytest.mark.slow
def test_norm_gradient_divides_by_the_norm_over_logprobs():
  arrays, batch, logprobs, entropy = batch_arrays.arrays(spread=0.6)
  row = batches.algorithm_options('s_ppo', **{_NORM: 'gradient'})
  row['correction']['clipping_bias']['floor'] = 1e-6
  found = _score(arrays, row)
  mask, advantages = batch.loss_mask_BL, batch.advantages_BL
  ratio = np.exp(logprobs - batch.old_logprobs_BL)
  outside = mask & ((ratio < 0.8) | (ratio > 1.2))
  norm = np.linalg.norm((ratio * advantages)[outside]) / mask.sum()
  assert norm > 1e-3
  plain = batches.algorithm_options('token_ppo')
  whole = _score(arrays, plain).arrays['dloss_dlogprobs_BL']
  np.testing.assert_allclose(
    found.arrays['dloss_dlogprobs_BL'], whole / norm, rtol=1e-10
  )
  assert found.metrics['stab/bias_grad_norm'] == pytest.approx(norm, rel=1e-10)


@pytest.mark.slow
def test_bounds_by_reward_are_those_of_the_rewards_of_the_file():
  arrays, batch, *_ = batch_arrays.arrays()
  groups = np.array([0, 0, 0, 1, 1, 1])
  found = _score(
    {**arrays, 'group_ids_B': groups}, batches.algorithm_options('a2tgpo')
  )
  z = advantage_twins.turn_z(batch.replace(group_ids_B=groups), 1e-6)
  assert len(z) > 8
  high_BL = found.arrays['high_BL']
  for (b, k), x in z.items():
    own = batch.loss_mask_BL[b] & (batch.turn_ids_BL[b] == k)
    scale = 1 + 0.3 * (2 / (1 + math.exp(-x)) - 1)
    np.testing.assert_allclose(high_BL[b, own], 1 + 4e-3 * scale, rtol=1e-12)


def test_a_file_with_five_arrays_is_enough():
  arrays, *_ = batch_arrays.arrays()
  row = batches.algorithm_options('st_ppo')
  whole = _score(arrays, row, 0.0)
  needs = lab.required_arrays(
    batches.algorithm('st_ppo'), entropy_coefficient=0.0
  )
  assert len(needs) == 5
  few = _score({n: arrays[n] for n in needs}, row, 0.0)
  for name in few.arrays:
    np.testing.assert_allclose(few.arrays[name], whole.arrays[name], rtol=1e-12)
  said = set(whole.metrics) - set(few.metrics)
  assert said and not set(few.metrics) - set(whole.metrics)
  for name in said:  # what is not measured is left out
    assert name == 'actor/entropy' or name.startswith(
      ('mismatch/', 'ratio/sentence/', 'clipfrac/sentence/')
    )
  for name, value in few.metrics.items():
    assert value == pytest.approx(whole.metrics[name], rel=1e-12)


def test_a_batch_without_a_trained_token_gives_zeros():
  shape = 1, 7
  arrays = {
    name: np.zeros(shape, int if 'ids' in name or 'mask' in name else float)
    for name in lab.required_arrays(
      batches.algorithm('st_ppo'), entropy_coefficient=0.0
    )
  }
  found = _score(arrays, batches.algorithm_options('st_ppo'), 0.0)
  assert set(found.metrics.values()) <= {0.0, 1.0}  # rho's scale is 1
  assert found.metrics['loss'] == 0
  for name, x in found.arrays.items():
    if name != 'loss':
      assert x.shape == shape
  assert not found.arrays['dloss_dlogprobs_BL'].any()


@pytest.mark.slow
def test_only_a_metric_that_the_algorithm_does_not_use_may_overflow():
  """Squares of 1e200 overflow; the loss and its gradient do not."""
  arrays, batch, *_ = batch_arrays.arrays()
  arrays['advantages_BL'] = arrays['advantages_BL'] * 1e200
  found = _score(arrays, batches.algorithm_options('token_ppo'), 0.0)
  assert found.metrics['stab/norm_clipped'] == math.inf
  assert not np.isfinite(found.metrics['stab/rho'])
  gradient = found.arrays['dloss_dlogprobs_BL']
  norm = np.linalg.norm(gradient / 1e200) * 1e200
  assert found.metrics['actor/grad_norm'] == pytest.approx(norm, rel=1e-12)
  # s_ppo divides its loss by the same numbers.
  with pytest.raises(saved_batch.NotFinite, match='^stab/norm_clipped, stab/'):
    _score(arrays, batches.algorithm_options('s_ppo'), 0.0)
  arrays['advantages_BL'][batch.loss_mask_BL] = 1.7e308
  with pytest.raises(saved_batch.NotFinite, match='^loss: not finite in float'):
    _score(arrays, batches.algorithm_options('token_ppo'), 0.0)
