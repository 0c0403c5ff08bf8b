import functools

import jax
import numpy as np
import pytest

from stppo_jax.rl import advantages
from stppo_jax.rl import gae
from stppo_jax.rl import masking
from tests.rl import advantage_twins
from tests.rl import batches
from tests.rl import twins

GAMMA, LAMBDA = 0.9, 0.7
GAMMA_TURN, LAMBDA_TURN = 0.8, 0.6
FIELDS = ('advantages_BL', 'returns_BL', 'value_mask_BL')


OPTIONS = {
  'whiten': 'none',
  'steps': 'token',
  'observation_tokens': 'skipped',
  'critic_tokens': 'policy',
  'gamma': GAMMA,
  'lambda_': LAMBDA,
  'gamma_turn': GAMMA_TURN,
  'lambda_turn': LAMBDA_TURN,
}


@functools.partial(
  jax.jit,
  static_argnames=('whiten', 'steps', 'observation_tokens', 'critic_tokens'),
)
def _jitted(batch, **options):
  return advantages.estimate_advantages(
    batch.rewards_BL, batch, name='gae', num_turns=batches.T, **options
  )


def _estimate(batch, **changes):
  return jax.tree.map(np.asarray, _jitted(batch, **(OPTIONS | changes)))


def _agree(one, other, fields=FIELDS):
  for name in fields:
    np.testing.assert_allclose(
      getattr(one, name), getattr(other, name), rtol=1e-10, atol=1e-12
    )


def test_a_reward_between_steps_belongs_to_the_step_before():
  out = jax.jit(gae.gae)(
    np.array([[0.0, 3.0, 1.0]]),
    np.zeros((1, 3)),
    np.array([[True, False, True]]),
    gamma=0.5,
    lambda_=0.0,
  )
  np.testing.assert_allclose(out, [[3, 0, 1]])


@pytest.mark.parametrize(
  ('observation_tokens', 'steps_of'),
  [('skipped', lambda mask: mask), ('included', advantage_twins.response)],
)
def test_token_steps_are_gae_with_other_tokens_deleted(
  observation_tokens, steps_of
):
  batch, _, _ = batches.make()
  mask = batch.loss_mask_BL
  found = advantage_twins.over_tokens(batch, steps_of(mask), GAMMA, LAMBDA)
  actual = _estimate(batch, observation_tokens=observation_tokens)
  expected = np.where(mask, found, 0)
  returns = np.where(mask, found + batch.values_BL, 0)
  np.testing.assert_allclose(actual.advantages_BL, expected, rtol=1e-12)
  np.testing.assert_allclose(actual.returns_BL, returns, rtol=1e-12)
  np.testing.assert_array_equal(actual.value_mask_BL, mask)


def test_a_critic_at_the_whole_response_has_targets_at_observations():
  batch, _, _ = batches.make()
  options = {'observation_tokens': 'included'}
  policy = _estimate(batch, **options)
  actual = _estimate(batch, critic_tokens='response', **options)
  response = advantage_twins.response(batch.loss_mask_BL)
  assert (response & ~batch.loss_mask_BL).any()
  np.testing.assert_array_equal(actual.value_mask_BL, response)
  np.testing.assert_array_equal(actual.advantages_BL, policy.advantages_BL)
  found = advantage_twins.over_tokens(batch, response, GAMMA, LAMBDA)
  expected = np.where(response, found + batch.values_BL, 0)
  np.testing.assert_allclose(actual.returns_BL, expected, rtol=1e-12)


def test_without_discounts_values_at_observations_are_not_read():
  batch, _, _ = batches.make()
  mask = batch.loss_mask_BL
  other = batch.replace(values_BL=np.where(mask, batch.values_BL, 7.0))
  options = {'observation_tokens': 'included', 'gamma': 1.0, 'lambda_': 1.0}
  one, same = _estimate(batch, **options), _estimate(other, **options)
  _agree(one, same)
  options['lambda_'] = LAMBDA
  one, two = _estimate(batch, **options), _estimate(other, **options)
  assert np.abs(one.advantages_BL - two.advantages_BL).max() > 0.01


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


def test_bilevel_steps_are_two_loops():
  batch, _, _ = batches.make()
  actual = _estimate(batch, steps='bilevel')
  expected, returns = advantage_twins.bilevel(
    batch, batch.rewards_BL, GAMMA, LAMBDA, GAMMA_TURN, LAMBDA_TURN
  )
  np.testing.assert_allclose(actual.advantages_BL, expected, rtol=1e-12)
  np.testing.assert_allclose(actual.returns_BL, returns, rtol=1e-12)
  np.testing.assert_array_equal(actual.value_mask_BL, batch.loss_mask_BL)


def test_bilevel_with_full_turn_traces_ignores_the_values_between_turns():
  # RAGEN's code reads V at the last token of a turn, ours at the first.
  batch, _, _ = batches.make()
  expected, returns = advantage_twins.bilevel(
    batch, batch.rewards_BL, GAMMA, LAMBDA, GAMMA_TURN, 1.0, turn_value=-1
  )
  actual = _estimate(batch, steps='bilevel', lambda_turn=1.0)
  np.testing.assert_allclose(actual.advantages_BL, expected, atol=1e-12)
  np.testing.assert_allclose(actual.returns_BL, returns, atol=1e-12)


def test_whitening_all_includes_observation_tokens():
  batch, _, _ = batches.make()
  mask = batch.loss_mask_BL
  response = advantage_twins.response(mask)
  assert (response & ~mask).sum() > 5
  plain = advantage_twins.over_tokens(batch, response, GAMMA, LAMBDA)
  expected = np.where(mask, twins.whiten(plain, response), 0)
  included = {'observation_tokens': 'included'}
  actual = _estimate(batch, whiten='all', **included)
  np.testing.assert_allclose(actual.advantages_BL, expected, rtol=1e-10)
  policy = _estimate(batch, whiten='policy', **included)
  assert np.abs(actual.advantages_BL - policy.advantages_BL).max() > 0.01
  _agree(actual, policy, ('returns_BL', 'value_mask_BL'))


def test_poison_outside_the_response_changes_nothing_if_included():
  batch, _, _ = batches.make()
  mask = batch.loss_mask_BL
  begun = np.logical_or.accumulate(mask, axis=1)
  to_come = np.logical_or.accumulate(mask[:, ::-1], axis=1)[:, ::-1]
  inside = begun & to_come
  poisoned = batch.replace(
    values_BL=batches.poison_array(batch.values_BL, inside, np.nan),
    rewards_BL=batches.poison_array(batch.rewards_BL, mask, np.nan),
  )
  for whiten in masking.WHITENS:
    options = {'whiten': whiten, 'observation_tokens': 'included'}
    np.testing.assert_array_equal(
      _estimate(poisoned, **options).advantages_BL,
      _estimate(batch, **options).advantages_BL,
    )


def test_monte_carlo_is_the_reward_to_go():
  batch, _, _ = batches.make()
  expected = np.zeros(batch.loss_mask_BL.shape)
  for b, row in enumerate(batch.loss_mask_BL):
    to_go = 0.0
    for i in np.flatnonzero(row)[::-1]:
      to_go = batch.rewards_BL[b, i] + GAMMA * to_go
      expected[b, i] = to_go
  actual = jax.jit(
    lambda batch: advantages.estimate_advantages(
      batch.rewards_BL,
      batch,
      name='monte_carlo',
      whiten='none',
      num_turns=batches.T,
      gamma=GAMMA,
    )
  )(batch)
  np.testing.assert_allclose(actual.advantages_BL, expected, rtol=1e-10)
