import functools

import jax
import numpy as np
import pytest

from stppo_jax.configs import defaults
from stppo_jax.rl import advantages
from tests.rl import advantage_twins
from tests.rl import batches
from tests.rl import twins

GAMMA, LAMBDA = 0.9, 0.7
GAMMA_TURN, LAMBDA_TURN = 0.8, 0.6


OPTIONS = defaults.choice(
  'advantage',
  'gae',
  whiten='none',
  gamma=GAMMA,
  lambda_=LAMBDA,
  gamma_turn=GAMMA_TURN,
  lambda_turn=LAMBDA_TURN,
)


@functools.partial(
  jax.jit,
  static_argnames=[key for key, x in OPTIONS.items() if isinstance(x, str)],
)
def _jitted(batch, **options):
  return advantages.estimate_advantages(
    batch.rewards_BL, batch, num_turns=batches.T, **options
  )


def _estimate(batch, **changes):
  return jax.tree.map(np.asarray, _jitted(batch, **(OPTIONS | changes)))


@pytest.mark.parametrize(
  ('observation_tokens', 'critic_tokens'),
  [('skipped', 'policy'), ('included', 'policy'), ('included', 'response')],
)
def test_token_steps_are_gae_with_other_tokens_deleted(
  observation_tokens, critic_tokens
):
  batch, _, _ = batches.make()
  mask = batch.loss_mask_BL
  response = advantage_twins.response(mask)
  assert (response & ~mask).any()
  steps = response if observation_tokens == 'included' else mask
  targets = response if critic_tokens == 'response' else mask
  found = advantage_twins.over_tokens(batch, steps, GAMMA, LAMBDA)
  actual = _estimate(
    batch, observation_tokens=observation_tokens, critic_tokens=critic_tokens
  )
  expected = np.where(mask, found, 0)
  returns = np.where(targets, found + batch.values_BL, 0)
  np.testing.assert_allclose(actual.advantages_BL, expected, rtol=1e-12)
  np.testing.assert_allclose(actual.returns_BL, returns, rtol=1e-12)
  np.testing.assert_array_equal(actual.value_mask_BL, targets)


def test_without_discounts_values_at_observations_are_not_read():
  batch, _, _ = batches.make()
  values_BL = np.where(batch.loss_mask_BL, batch.values_BL, 7.0)
  for lambda_ in (1.0, LAMBDA):
    options = {'observation_tokens': 'included', 'lambda_': lambda_}
    one, other = (
      _estimate(x, gamma=1.0, **options).advantages_BL
      for x in (batch, batch.replace(values_BL=values_BL))
    )
    if lambda_ == 1:
      np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)
    else:
      assert np.abs(one - other).max() > 0.01


def test_turn_steps_are_a_loop_over_turns():
  batch, _, _ = batches.make()
  actual = _estimate(batch, steps='turn')
  expected, returns = np.zeros((2, *batch.values_BL.shape))
  first_tokens = np.zeros(batch.loss_mask_BL.shape, bool)
  for b in range(batches.B):
    turns = advantage_twins.turns_of(batch, b)
    values = [batch.values_BL[b, turn[0]] for turn in turns]
    rewards = [batch.rewards_BL[b, turn].sum() for turn in turns]
    found = twins.gae(rewards, values, GAMMA, LAMBDA)
    for turn, value, advantage in zip(turns, values, found, strict=True):
      expected[b, turn] = advantage
      returns[b, turn] = advantage + value
      first_tokens[b, turn[0]] = True
  np.testing.assert_allclose(actual.advantages_BL, expected, rtol=1e-12)
  np.testing.assert_allclose(actual.returns_BL, returns, rtol=1e-12)
  np.testing.assert_array_equal(actual.value_mask_BL, first_tokens)


# RAGEN's code reads V at the last token of a turn, ours at the first: with full
# traces over turns it is the same.
@pytest.mark.parametrize(
  ('lambda_turn', 'turn_value'), [(LAMBDA_TURN, 0), (1.0, 0), (1.0, -1)]
)
def test_bilevel_steps_are_two_loops(lambda_turn, turn_value):
  batch, _, _ = batches.make()
  actual = _estimate(batch, steps='bilevel', lambda_turn=lambda_turn)
  expected, returns = advantage_twins.bilevel(
    batch,
    batch.rewards_BL,
    GAMMA,
    LAMBDA,
    GAMMA_TURN,
    lambda_turn,
    turn_value,
  )
  np.testing.assert_allclose(actual.advantages_BL, expected, atol=1e-12)
  np.testing.assert_allclose(actual.returns_BL, returns, atol=1e-12)
  np.testing.assert_array_equal(actual.value_mask_BL, batch.loss_mask_BL)


def test_whitening_all_reads_no_token_but_included_observations():
  batch, _, _ = batches.make()
  mask = batch.loss_mask_BL
  response = advantage_twins.response(mask)
  assert (response & ~mask).sum() > 5
  plain = advantage_twins.over_tokens(batch, response, GAMMA, LAMBDA)
  expected = np.where(mask, twins.whiten(plain, response), 0)
  poisoned = batch.replace(
    values_BL=batches.poison_array(batch.values_BL, response, np.nan),
    rewards_BL=batches.poison_array(batch.rewards_BL, mask, np.nan),
  )
  for given in (batch, poisoned):
    actual = _estimate(given, whiten='all', observation_tokens='included')
    np.testing.assert_allclose(actual.advantages_BL, expected, rtol=1e-10)
