"""GAE with a lambda for the critic, and one that depends on the length."""

import functools

import jax
import numpy as np
import pytest

from stppo_jax import batch as batch_lib
from stppo_jax.rl import advantages
from stppo_jax.rl import diagnostics
from tests.rl import batches
from tests.rl import twins

FIELDS = ('advantages_BL', 'returns_BL', 'value_mask_BL')
BASELINES = pytest.mark.parametrize('baseline', advantages.BASELINES)


@functools.partial(jax.jit, static_argnames=('baseline', 'whiten'))
def _estimate(
  batch,
  baseline='critic',
  whiten='none',
  gamma=0.9,
  lambda_=0.8,
  lambda_critic=0.7,
  alpha=0.3,
):
  return advantages.estimate_advantages(
    batch.rewards_BL,
    batch,
    name='decoupled_gae',
    whiten=whiten,
    num_turns=batches.T,
    gamma=gamma,
    lambda_=lambda_,
    lambda_critic=lambda_critic,
    alpha=alpha,
    baseline=baseline,
  )


def _twin(
  batch, baseline, gamma=0.9, lambda_=0.8, lambda_critic=0.7, alpha=0.3
):
  """Returns (advantages, returns) of plain loops."""
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
  return out, returns


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


@BASELINES
@pytest.mark.parametrize('scale', [0.3, 30.0])
def test_estimates_equal_plain_loops(baseline, scale):
  batch = _batch(scale)
  expected, returns = _twin(batch, baseline)
  actual = _estimate(batch, baseline)
  np.testing.assert_allclose(actual.advantages_BL, expected, rtol=1e-9)
  np.testing.assert_allclose(actual.returns_BL, returns, rtol=1e-9)
  np.testing.assert_array_equal(actual.value_mask_BL, batch.loss_mask_BL)
  # The critic is the baseline only where it explains the returns.
  explained = diagnostics.critic_diagnostics(
    batch.replace(
      returns_BL=actual.returns_BL, value_mask_BL=actual.value_mask_BL
    )
  )['critic/vf_explained_var']
  assert (explained > 0) == (scale < 1)
  critic, _ = _twin(batch, 'critic')
  same = np.array_equal(expected, critic)
  assert same == (baseline == 'critic' or scale < 1)


def test_equal_lambdas_without_alpha_are_gae():
  batch, _, _ = batches.make()
  numbers = {'gamma': 0.9, 'lambda_': 0.7}
  plain = advantages.estimate_advantages(
    batch.rewards_BL,
    batch,
    name='gae',
    whiten='policy',
    num_turns=batches.T,
    steps='token',
    observation_tokens='skipped',
    critic_tokens='policy',
    gamma_turn=1.0,
    lambda_turn=1.0,
    **numbers,
  )
  ours = _estimate(batch, whiten='policy', alpha=np.inf, **numbers)
  for name in FIELDS:
    np.testing.assert_allclose(
      getattr(ours, name), getattr(plain, name), rtol=1e-12
    )


def test_the_outcome_reaches_back_a_share_of_the_row():
  # alpha is about how many rows long the reach of lambda is: the outcome counts
  # exp(-1 / alpha) at the start of any long row.
  lengths = np.array([200, 400, 2000])
  mask_BL = np.arange(2000) < lengths[:, None]
  zeros_BL = np.zeros(mask_BL.shape)
  rewards_BL = zeros_BL.copy()
  rewards_BL[np.arange(3), lengths - 1] = 1.0
  batch = batch_lib.TokenBatch(
    tokens_BL=np.zeros(mask_BL.shape, np.int32),
    lengths_B=lengths.astype(np.int32),
    turn_ids_BL=mask_BL.astype(np.int32),
    loss_mask_BL=mask_BL,
    sampler_logprobs_BL=zeros_BL,
    rewards_BL=rewards_BL,
    group_ids_B=np.arange(3, dtype=np.int32),
    values_BL=zeros_BL,
  )
  out = _estimate(batch, gamma=1.0, lambda_=1.0, alpha=0.5)
  np.testing.assert_allclose(out.advantages_BL[:, 0], np.exp(-2), rtol=0.01)
