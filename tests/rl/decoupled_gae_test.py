"""GAE with a lambda for the critic, and one that depends on the length."""

import functools

import jax
import numpy as np
import pytest

from stppo_jax.rl import advantages
from tests.rl import batches
from tests.rl import twins

NUMBERS = {'gamma': 0.9, 'lambda_': 0.8, 'lambda_critic': 0.7}


@functools.partial(jax.jit, static_argnames='baseline')
def _estimate(batch, baseline, alpha):
  return advantages.estimate_advantages(
    batch.rewards_BL,
    batch,
    name='decoupled_gae',
    whiten='none',
    num_turns=batches.T,
    alpha=alpha,
    baseline=baseline,
    **NUMBERS,
  )


def _twin(batch, baseline, alpha):
  """Returns (advantages, returns) of plain loops, and what V explains."""
  gamma, lambda_, lambda_critic = NUMBERS.values()
  mask = batch.loss_mask_BL
  out, returns = np.zeros((2, *mask.shape))
  for b, row in enumerate(mask):
    rewards, values = batch.rewards_BL[b, row], batch.values_BL[b, row]
    returns[b, row] = values + twins.gae(rewards, values, gamma, lambda_critic)
  mean, variance = twins.moments(returns, mask)
  _, missed = twins.moments(returns - batch.values_BL, mask)
  explained = 1 - missed / variance
  for b, row in enumerate(mask):
    rewards, values = batch.rewards_BL[b, row], batch.values_BL[b, row]
    if baseline == 'explained' and explained <= 0:
      values = np.full(values.shape, mean)
    if len(rewards):
      own = lambda_ * max(1 - 1 / (alpha * len(rewards)), 0)
      out[b, row] = twins.gae(rewards, values, gamma, own)
  return out, returns, explained


def _batch(scale):
  """Returns a batch whose values are their targets, plus noise of a scale."""
  batch, _, _ = batches.make()
  returns = np.zeros(batch.values_BL.shape)
  for b, row in enumerate(batch.loss_mask_BL):
    # Values that equal the rewards-to-go explain all of them.
    to_go = twins.gae(batch.rewards_BL[b, row], np.zeros(row.sum()), 0.9, 1.0)
    returns[b, row] = to_go
  noise = np.random.default_rng(3).normal(size=returns.shape)
  return batch.replace(values_BL=returns + scale * noise)


@pytest.mark.parametrize('alpha', [0.3, np.inf])
@pytest.mark.parametrize('baseline', advantages.BASELINES)
@pytest.mark.parametrize('scale', [0.3, 30.0])
def test_estimates_equal_plain_loops(baseline, scale, alpha):
  batch = _batch(scale)
  expected, returns, explained = _twin(batch, baseline, alpha)
  actual = _estimate(batch, baseline, alpha)
  np.testing.assert_allclose(actual.advantages_BL, expected, rtol=1e-9)
  np.testing.assert_allclose(actual.returns_BL, returns, rtol=1e-9)
  np.testing.assert_array_equal(actual.value_mask_BL, batch.loss_mask_BL)
  # The critic is the baseline only where it explains the returns.
  assert (explained > 0) == (scale < 1)
  critic, _, _ = _twin(batch, 'critic', alpha)
  same = np.array_equal(expected, critic)
  assert same == (baseline == 'critic' or scale < 1)
