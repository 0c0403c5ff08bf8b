"""Rows and estimators on frozen rollouts, against plain loops in float64."""

import math

import jax
import numpy as np
import pytest

from configs import algorithms
from stppo_jax.analysis import frozen
from stppo_jax.analysis import lab
from stppo_jax.rl import algorithm as algorithm_lib
from tests.analysis import rollout_arrays
from tests.rl import batches
from tests.rl import loss_twin
from tests.rl import twins

_ENTROPY = 0.01
_TAU = 'correction__clipping_bias__tau'
_NORM = 'correction__clipping_bias__norm'


@pytest.fixture(autouse=True)
def _double_precision():
  with jax.enable_x64(True):
    yield


def _select(arrays, algorithm, coefficient=_ENTROPY):
  needs = lab.score_needs(algorithm, entropy_coefficient=coefficient)
  return frozen.select(
    arrays, dict.fromkeys(needs, 'it'), lab.SCORE_USES, dtype=np.float64
  )


def _score(arrays, row, coefficient=_ENTROPY):
  algorithm = algorithm_lib.build_algorithm(row)
  rollouts = _select(arrays, algorithm, coefficient)
  return lab.score(algorithm, rollouts, entropy_coefficient=coefficient)


@pytest.mark.parametrize('poison', [np.nan, np.inf])
@pytest.mark.parametrize(
  ('name', 'changes'),
  [
    ('st_ppo', {_TAU: 1.1}),
    # Reads everything that a row can read.
    (
      'sspo',
      {
        'correction__names': ('clipping_bias', 'tis'),
        'kl__where': 'loss',
        'kl__coefficient': 0.3,
      },
    ),
  ],
)
def test_a_score_is_the_twin_and_its_differences(name, changes, poison):
  row = batches.row_of(name, **changes)
  arrays, batch, logprobs, entropy = rollout_arrays.arrays(poison=poison)
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
  differences = twins.differences(
    lambda x: (
      loss_twin.policy_loss(
        row, x, entropy, batch, _ENTROPY, frozen=logprobs
      ).loss
    ),
    logprobs,
    slots,
  )
  at = tuple(slots.T)
  np.testing.assert_allclose(gradient[at], differences[at], atol=1e-8)
  norm = math.sqrt((gradient**2).sum())
  assert found.metrics['actor/grad_norm'] == pytest.approx(norm, rel=1e-12)


def test_norm_gradient_divides_by_the_norm_over_logprobs():
  arrays, batch, logprobs, entropy = rollout_arrays.arrays(spread=0.6)
  row = batches.row_of('s_ppo', **{_NORM: 'gradient'})
  row['correction']['clipping_bias']['floor'] = 1e-6
  found = _score(arrays, row)
  mask, advantages = batch.loss_mask_BL, batch.advantages_BL
  ratio = np.exp(logprobs - batch.old_logprobs_BL)
  outside = mask & ((ratio < 0.8) | (ratio > 1.2))
  norm = np.linalg.norm((ratio * advantages)[outside]) / mask.sum()
  assert norm > 1e-3
  plain = batches.row_of('token_ppo')
  whole = _score(arrays, plain).arrays['dloss_dlogprobs_BL']
  np.testing.assert_allclose(
    found.arrays['dloss_dlogprobs_BL'], whole / norm, rtol=1e-10
  )
  assert found.metrics['stab/bias_grad_norm'] == pytest.approx(norm, rel=1e-10)


def test_rows_that_are_the_same_score_the_same():
  arrays, *_ = rollout_arrays.arrays()
  a = _score(arrays, batches.row_of('s_ppo', **{_TAU: math.inf}))
  b = _score(arrays, batches.row_of('token_ppo'))
  assert a.metrics == pytest.approx(b.metrics, rel=1e-12, abs=1e-12)
  for name in a.arrays:
    np.testing.assert_allclose(a.arrays[name], b.arrays[name], rtol=1e-12)
  tight = _score(arrays, batches.row_of('s_ppo', **{_TAU: 1.1}))
  assert tight.metrics['stab/scale'] < 1
  assert tight.metrics['loss'] != b.metrics['loss']


def test_a_file_with_five_arrays_is_enough():
  arrays, *_ = rollout_arrays.arrays()
  whole = _score(arrays, batches.row_of('st_ppo'), 0.0)
  needs = lab.score_needs(batches.algorithm('st_ppo'), entropy_coefficient=0.0)
  assert len(needs) == 5
  few = _score({n: arrays[n] for n in needs}, batches.row_of('st_ppo'), 0.0)
  for name in few.arrays:
    np.testing.assert_allclose(few.arrays[name], whole.arrays[name], rtol=1e-12)
  said = set(whole.metrics) - set(few.metrics)
  assert said and not set(few.metrics) - set(whole.metrics)
  for name in said:  # what nobody has measured is not told
    assert name == 'actor/entropy' or name.startswith(
      ('mismatch/', 'ratio/sentence/', 'clipfrac/sentence/')
    )
  for name, value in few.metrics.items():
    assert value == pytest.approx(whole.metrics[name], rel=1e-12)


def test_what_a_row_reads_is_what_it_needs():
  needs = lambda name, coefficient=0.0: lab.score_needs(
    batches.algorithm(name), entropy_coefficient=coefficient
  )
  five = needs('st_ppo')
  assert needs('sspo') == five | {'sentence_ids_BL', 'entropy_BL'}
  assert needs('minirl') == five | {'sampler_logprobs_BL'}
  assert needs('so_grpo') == five | {'ref_logprobs_BL'}
  assert needs('st_ppo', 0.1) == five | {'entropy_BL'}


@pytest.mark.parametrize('shape', [(0, 7), (1, 0), (1, 7)])
def test_a_batch_without_a_trained_token_gives_zeros(shape):
  arrays = {
    name: np.zeros(shape, int if 'ids' in name or 'mask' in name else float)
    for name in lab.score_needs(
      batches.algorithm('st_ppo'), entropy_coefficient=0.0
    )
  }
  found = _score(arrays, batches.row_of('st_ppo'), 0.0)
  assert set(found.metrics.values()) <= {0.0, 1.0}  # rho's scale is 1
  assert found.metrics['loss'] == 0
  for name, x in found.arrays.items():
    if name != 'loss':
      assert x.shape == shape
  assert not found.arrays['dloss_dlogprobs_BL'].any()


def _estimate(arrays, name, compares=False, **options):
  estimator = lab.build_estimator(
    algorithms.block('advantage', name, **options)
  )
  needs = lab.advantages_needs(estimator, arrays, compares=compares)
  rollouts = frozen.select(
    arrays, dict.fromkeys(needs, 'it'), lab.ADVANTAGES_USES, dtype=np.float64
  )
  problems = lab.estimate_problems(estimator, rollouts)
  return problems or lab.estimate(estimator, rollouts)


def test_gae_is_the_twin():
  arrays, batch, *_ = rollout_arrays.arrays()
  found = _estimate(arrays, 'gae', gamma=0.9, lambda_=0.8, whiten='none')
  mask = batch.loss_mask_BL
  advantages = np.zeros(mask.shape)
  for b in range(len(mask)):
    at = mask[b]
    advantages[b, at] = twins.gae(
      list(batch.rewards_BL[b, at]), list(batch.values_BL[b, at]), 0.9, 0.8
    )
  returns = np.where(mask, advantages + batch.values_BL, 0)
  for name, expected in (('advantages', advantages), ('returns', returns)):
    np.testing.assert_allclose(found.arrays[f'{name}_BL'], expected, atol=1e-12)
    on = expected[mask]
    for key, number in (
      ('mean', on.mean()),
      ('std', on.std(ddof=1)),
      ('min', on.min()),
      ('max', on.max()),
    ):
      assert found.metrics[f'{name}/{key}'] == pytest.approx(number)
  np.testing.assert_array_equal(found.arrays['value_mask_BL'], mask)


def test_old_values_go_before_new_ones():
  arrays, *_ = rollout_arrays.arrays()
  old = _estimate(arrays, 'gae')
  arrays['values_BL'] = arrays['old_values_BL'] + 1
  both = _estimate(arrays, 'gae')
  assert both.metrics == old.metrics
  del arrays['old_values_BL']
  new = _estimate(arrays, 'gae')
  assert new.metrics != old.metrics
  arrays['old_values_BL'] = arrays.pop('values_BL')
  assert _estimate(arrays, 'gae').metrics == new.metrics


def test_groups_are_compared_and_one_alone_is_nothing():
  arrays, batch, *_ = rollout_arrays.arrays()
  mask = batch.loss_mask_BL
  alone = _estimate(arrays, 'group_normalized', compares=True)
  assert not alone.arrays['advantages_BL'].any()
  assert set(alone.metrics.values()) == {0.0}
  arrays['group_ids_B'] = np.array([5, 5, 5, 5, -9, -9])
  found = _estimate(arrays, 'group_centered', compares=True)
  totals = np.where(mask, batch.rewards_BL, 0).sum(axis=1)
  expected = np.zeros(len(totals))
  expected[:3] = totals[:3] - totals[:3].mean()  # row 3 has failed
  expected[4:] = totals[4:] - totals[4:].mean()
  np.testing.assert_allclose(
    found.arrays['advantages_BL'],
    np.where(mask, expected[:, None], 0),
    atol=1e-12,
  )
  assert not found.arrays['returns_BL'].any()
  assert not found.arrays['value_mask_BL'].any()


@pytest.mark.parametrize('name', algorithms.BLOCKS['advantage'])
def test_what_an_estimator_needs_is_enough(name):
  arrays, batch, *_ = rollout_arrays.arrays()
  arrays['state_ids_BL'] = batch.turn_ids_BL
  compares = name in algorithms.GROUP_ADVANTAGES
  estimator = lab.build_estimator(algorithms.block('advantage', name))
  needs = lab.advantages_needs(estimator, arrays, compares=compares)
  assert ('group_ids_B' in needs) == compares
  found = _estimate({n: arrays[n] for n in needs}, name, compares)
  assert all(math.isfinite(x) for x in found.metrics.values())


def test_estimates_of_nothing_are_nothing():
  arrays, *_ = rollout_arrays.arrays()
  empty = {name: x[:0] for name, x in arrays.items()}
  found = _estimate(empty, 'group_normalized', compares=True)
  assert set(found.metrics.values()) == {0.0}
  assert found.arrays['advantages_BL'].shape == (0, batches.L)


def test_turns_out_of_order_and_values_that_are_missing_are_told():
  arrays, batch, *_ = rollout_arrays.arrays()
  mask = batch.loss_mask_BL
  response = {'observation_tokens': 'included', 'whiten': 'all'}
  (line,) = _estimate(arrays, 'gae', **response)
  assert line.startswith('old_values_BL: not finite in float64; ')
  fine = arrays | {'old_values_BL': batch.values_BL}
  assert _estimate(fine, 'gae', **response).metrics
  slot = tuple(np.argwhere(mask & (batch.turn_ids_BL == 1))[0])
  arrays['turn_ids_BL'][slot] = 3
  (line,) = _estimate(arrays, 'gae')
  assert line.startswith('turn_ids_BL: must not decrease in a row; ')
