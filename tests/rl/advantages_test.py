import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.rl import advantages
from tests.rl import batches
from tests.rl import twins

GAMMA, LAMBDA = 0.9, 0.7


@functools.partial(
  jax.jit, static_argnames=('whiten', 'steps', 'observation_tokens')
)
def _estimate(
  batch, whiten='none', steps='token', observation_tokens='skipped'
):
  return advantages.estimate_advantages(
    batch.rewards_BL,
    batch,
    name='gae',
    gamma=GAMMA,
    lambda_=LAMBDA,
    steps=steps,
    observation_tokens=observation_tokens,
    whiten=whiten,
  )


VARIANTS = pytest.mark.parametrize(
  'steps,observation_tokens',
  [('token', 'skipped'), ('token', 'included'), ('turn', 'skipped')],
)


def test_gae_by_hand():
  # One observation between two policy tokens; values 0.5 and 0.25.
  out = advantages.gae(
    np.array([[0.0, 0.0, 1.0]]),
    np.array([[0.5, 99.0, 0.25]]),
    np.array([[True, False, True]]),
    gamma=0.5,
    lambda_=0.5,
  )
  last = 1 - 0.25
  first = 0.5 * 0.25 - 0.5 + 0.25 * last
  np.testing.assert_allclose(out, [[first, 0, last]])


def test_a_reward_between_steps_belongs_to_the_step_before():
  out = advantages.gae(
    np.array([[0.0, 3.0, 1.0]]),
    np.zeros((1, 3)),
    np.array([[True, False, True]]),
    gamma=0.5,
    lambda_=0.0,
  )
  np.testing.assert_allclose(out, [[3, 0, 1]])


def test_token_steps_are_gae_with_other_tokens_deleted():
  batch, _, _ = batches.make()
  actual = _estimate(batch)
  expected = np.zeros(batch.values_BL.shape)
  for b, mask in enumerate(batch.loss_mask_BL):
    expected[b, mask] = twins.gae(
      batch.rewards_BL[b, mask], batch.values_BL[b, mask], GAMMA, LAMBDA
    )
  returns = np.where(batch.loss_mask_BL, expected + batch.values_BL, 0)
  np.testing.assert_allclose(actual.advantages_BL, expected, rtol=1e-12)
  np.testing.assert_allclose(actual.returns_BL, returns, rtol=1e-12)
  np.testing.assert_array_equal(actual.value_mask_BL, batch.loss_mask_BL)


def test_included_observations_are_steps_from_first_to_last_policy_token():
  batch, _, _ = batches.make()
  actual = _estimate(batch, observation_tokens='included')
  expected = np.zeros(batch.values_BL.shape)
  for b, mask in enumerate(batch.loss_mask_BL):
    if mask.any():
      first, last = np.flatnonzero(mask)[[0, -1]]
      span = slice(first, last + 1)
      rewards = np.where(mask, batch.rewards_BL[b], 0)[span]
      expected[b, span] = twins.gae(
        rewards, batch.values_BL[b, span], GAMMA, LAMBDA
      )
  expected = np.where(batch.loss_mask_BL, expected, 0)
  np.testing.assert_allclose(actual.advantages_BL, expected, rtol=1e-12)
  np.testing.assert_array_equal(actual.value_mask_BL, batch.loss_mask_BL)
  skipped = _estimate(batch).advantages_BL
  assert np.abs(actual.advantages_BL - skipped).max() > 0.01


def test_turn_steps_are_a_loop_over_turns():
  batch, _, _ = batches.make()
  actual = _estimate(batch, steps='turn')
  expected, returns = np.zeros((2, *batch.values_BL.shape))
  first_tokens = np.zeros(batch.loss_mask_BL.shape, bool)
  for b, mask in enumerate(batch.loss_mask_BL):
    turns = [
      np.flatnonzero(mask & (batch.turn_ids_BL[b] == turn))
      for turn in np.unique(batch.turn_ids_BL[b][mask])
    ]
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


def test_undiscounted_returns_are_rewards_to_go():
  batch, _, _ = batches.make()
  estimate = advantages.gae_estimator(
    batch.rewards_BL,
    batch,
    gamma=1.0,
    lambda_=1.0,
    steps='token',
    observation_tokens='skipped',
  )
  rewards = np.where(batch.loss_mask_BL, batch.rewards_BL, 0)
  to_go = np.cumsum(rewards[:, ::-1], axis=1)[:, ::-1]
  np.testing.assert_allclose(
    estimate.returns_BL, np.where(batch.loss_mask_BL, to_go, 0), atol=1e-12
  )


@VARIANTS
def test_whitening_touches_advantages_only(steps, observation_tokens):
  batch, _, _ = batches.make()
  plain = _estimate(batch, 'none', steps, observation_tokens)
  white = _estimate(batch, 'policy', steps, observation_tokens)
  np.testing.assert_allclose(
    white.advantages_BL,
    twins.whiten(np.asarray(plain.advantages_BL), batch.loss_mask_BL),
    rtol=1e-10,
  )
  np.testing.assert_array_equal(white.returns_BL, plain.returns_BL)


@VARIANTS
def test_failed_row_is_an_absent_row(steps, observation_tokens):
  batch, _, _ = batches.make()
  present = np.arange(batches.B) != batches.FAILED_ROW
  whole = _estimate(batch, 'policy', steps, observation_tokens)
  without = _estimate(
    batches.rows(batch, present), 'policy', steps, observation_tokens
  )
  for name in ('advantages_BL', 'returns_BL', 'value_mask_BL'):
    whole_BL = np.asarray(getattr(whole, name))
    np.testing.assert_allclose(
      whole_BL[present], getattr(without, name), rtol=1e-12
    )
    assert not whole_BL[batches.FAILED_ROW].any()


@VARIANTS
def test_rows_may_be_permuted(steps, observation_tokens):
  batch, _, _ = batches.make()
  order = np.array([4, 2, 0, 5, 3, 1])
  whole = _estimate(batch, 'policy', steps, observation_tokens)
  permuted = _estimate(
    batches.rows(batch, order), 'policy', steps, observation_tokens
  )
  np.testing.assert_allclose(
    permuted.advantages_BL,
    np.asarray(whole.advantages_BL)[order],
    rtol=1e-12,
  )


@pytest.mark.parametrize('value', [np.nan, np.inf])
@pytest.mark.parametrize('steps', advantages.STEPS)
def test_poison(steps, value):
  batch, _, _ = batches.make()

  def total(arrays, batch):
    batch = batch.replace(**arrays)
    out = _estimate(batch, 'policy', steps)
    weight = jnp.arange(batches.L, dtype=float)[None]
    # Every output slot counts: off the mask they must be 0.
    return jnp.sum(weight * (out.advantages_BL**2 + out.returns_BL))

  def run(batch):
    arrays = {
      'values_BL': jnp.asarray(batch.values_BL),
      'rewards_BL': jnp.asarray(batch.rewards_BL),
    }
    return jax.value_and_grad(total)(arrays, batch)

  clean, clean_gradient = run(batch)
  poisoned, gradient = run(batches.poison(batch, value))
  np.testing.assert_array_equal(poisoned, clean)
  jax.tree.map(np.testing.assert_array_equal, gradient, clean_gradient)
  for array in gradient.values():
    assert not np.asarray(array)[~batch.loss_mask_BL].any()


def test_included_poison_outside_the_response():
  batch, _, _ = batches.make()
  mask = batch.loss_mask_BL
  begun = np.logical_or.accumulate(mask, axis=1)
  to_come = np.logical_or.accumulate(mask[:, ::-1], axis=1)[:, ::-1]
  inside = begun & to_come
  poisoned = batch.replace(
    values_BL=batches.poison_array(batch.values_BL, inside, np.nan),
    rewards_BL=batches.poison_array(batch.rewards_BL, mask, np.nan),
  )
  np.testing.assert_array_equal(
    _estimate(poisoned, observation_tokens='included').advantages_BL,
    _estimate(batch, observation_tokens='included').advantages_BL,
  )


def test_an_unknown_option_is_a_type_error():
  batch, _, _ = batches.make()
  options = batches.algorithm().advantage.arguments() | {'lambd': 1.0}
  with pytest.raises(TypeError, match='lambd'):
    advantages.estimate_advantages(batch.rewards_BL, batch, **options)
