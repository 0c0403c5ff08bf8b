import functools

import jax
import jax.numpy as jnp
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


@functools.partial(
  jax.jit,
  static_argnames=('whiten', 'steps', 'observation_tokens', 'critic_tokens'),
)
def _estimate(
  batch,
  whiten='none',
  steps='token',
  observation_tokens='skipped',
  critic_tokens='policy',
  gamma=GAMMA,
  lambda_=LAMBDA,
  gamma_turn=GAMMA_TURN,
  lambda_turn=LAMBDA_TURN,
):
  return advantages.estimate_advantages(
    batch.rewards_BL,
    batch,
    name='gae',
    gamma=gamma,
    lambda_=lambda_,
    steps=steps,
    observation_tokens=observation_tokens,
    critic_tokens=critic_tokens,
    gamma_turn=gamma_turn,
    lambda_turn=lambda_turn,
    whiten=whiten,
    num_turns=batches.T,
  )


def _agree(one, other, fields=FIELDS):
  for name in fields:
    np.testing.assert_allclose(
      getattr(one, name), getattr(other, name), rtol=1e-10, atol=1e-12
    )


VARIANTS = pytest.mark.parametrize(
  'steps,observation_tokens',
  [
    ('token', 'skipped'),
    ('token', 'included'),
    ('turn', 'skipped'),
    ('bilevel', 'skipped'),
  ],
)


def test_gae_by_hand():
  # One observation between two policy tokens; values 0.5 and 0.25.
  out = gae.gae(
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
  out = gae.gae(
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


def test_a_critic_at_the_whole_response_has_targets_at_observations():
  batch, _, _ = batches.make()
  options = {'observation_tokens': 'included'}
  policy = _estimate(batch, **options)
  actual = _estimate(batch, critic_tokens='response', **options)
  response = advantage_twins.response(batch.loss_mask_BL)
  assert (response & ~batch.loss_mask_BL).any()
  np.testing.assert_array_equal(actual.value_mask_BL, response)
  np.testing.assert_array_equal(actual.advantages_BL, policy.advantages_BL)
  expected = np.zeros(batch.values_BL.shape)
  for b, span in enumerate(response):
    values = batch.values_BL[b, span]
    rewards = np.where(batch.loss_mask_BL[b], batch.rewards_BL[b], 0)[span]
    expected[b, span] = twins.gae(rewards, values, GAMMA, LAMBDA) + values
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


def test_the_recursion_starts_anew_after_an_end():
  # Two turns of two tokens have the advantages of two rows.
  rewards = np.array([[0.0, 2.0, 0.0, 1.0]])
  values = np.array([[0.5, -1.0, 0.25, 3.0]])
  together = gae.gae(
    rewards,
    values,
    np.ones((1, 4), bool),
    end_mask_BL=np.array([[False, True, False, True]]),
    gamma=0.5,
    lambda_=0.5,
  )
  alone = gae.gae(
    rewards.reshape(2, 2),
    values.reshape(2, 2),
    np.ones((2, 2), bool),
    gamma=0.5,
    lambda_=0.5,
  )
  np.testing.assert_allclose(together, np.reshape(alone, (1, 4)))
  # The first by hand: delta = 0 + 0.5 * -1 - 0.5, and the next advantage is 3.
  np.testing.assert_allclose(np.ravel(together)[:2], [-1 + 0.25 * 3, 3])


def test_bilevel_by_hand():
  # Turns of two tokens and of one, an observation between them.
  batch, _, _ = batches.make()
  arrays = {
    'turn_ids_BL': np.array([[1, 1, 0, 2]], np.int32),
    'rewards_BL': np.array([[0.0, 1.0, 0.0, 4.0]]),
    'values_BL': np.array([[2.0, 3.0, 99.0, 1.0]]),
  }
  out = _estimate(
    batch.replace(**arrays, loss_mask_BL=arrays['turn_ids_BL'] > 0),
    steps='bilevel',
    gamma=0.5,
    lambda_=0.5,
    gamma_turn=0.5,
    lambda_turn=0.5,
  )
  last_turn = 4 - 1
  first_turn = 1 + 0.5 * 1 - 2 + 0.25 * last_turn  # 0.25, return 2.25
  second_token = 2.25 - 3
  first_token = 0.5 * 3 - 2 + 0.25 * second_token
  assert first_turn == 0.25
  expected = [[first_token, second_token, 0, last_turn]]
  np.testing.assert_allclose(out.advantages_BL, expected)
  np.testing.assert_allclose(
    out.returns_BL, [[first_token + 2, 2.25, 0, last_turn + 1]]
  )
  np.testing.assert_array_equal(out.value_mask_BL, [[True, True, False, True]])


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


def _ends_of_turns(batch):
  """Returns a mask of the last trained token of each turn."""
  out = np.zeros(batch.loss_mask_BL.shape, bool)
  for b in range(batches.B):
    for turn in advantage_twins.turns_of(batch, b):
      out[b, turn[-1]] = True
  return out


def _one_token_turns(batch):
  ids = np.where(batch.loss_mask_BL, np.cumsum(batch.loss_mask_BL, axis=1), 0)
  return batch.replace(turn_ids_BL=ids.astype(np.int32))


def test_turns_of_one_token_are_token_steps():
  batch, _, _ = batches.make()
  batch = _one_token_turns(batch)
  _agree(_estimate(batch, steps='turn'), _estimate(batch))
  _agree(
    _estimate(batch, steps='bilevel', gamma_turn=GAMMA, lambda_turn=LAMBDA),
    _estimate(batch),
  )


def test_bilevel_with_one_turn_is_token_steps_rewarded_at_the_end():
  batch, _, _ = batches.make()
  batch = batch.replace(turn_ids_BL=(batch.turn_ids_BL > 0).astype(np.int32))
  at_end = np.where(_ends_of_turns(batch), batch.rewards_BL, 0)
  batch = batch.replace(rewards_BL=at_end)
  _agree(_estimate(batch, steps='bilevel'), _estimate(batch))


def test_undiscounted_bilevel_returns_are_the_rewards_to_go_of_turns():
  batch, _, _ = batches.make()
  batch = batch.replace(
    rewards_BL=np.where(_ends_of_turns(batch), batch.rewards_BL, 0)
  )
  plain = {'gamma': 1.0, 'lambda_': 1.0}
  turns = {'gamma_turn': 1.0, 'lambda_turn': 1.0}
  _agree(
    _estimate(batch, steps='bilevel', **plain, **turns),
    _estimate(batch, **plain),
  )
  # Every token of a turn has the turn's return, whatever that is.
  _agree(
    _estimate(batch, steps='bilevel', **plain),
    _estimate(batch, steps='turn', gamma=GAMMA_TURN, lambda_=LAMBDA_TURN),
    ('returns_BL',),
  )


def test_undiscounted_returns_are_rewards_to_go():
  batch, _, _ = batches.make()
  estimate = _estimate(batch, gamma=1.0, lambda_=1.0)
  rewards = np.where(batch.loss_mask_BL, batch.rewards_BL, 0)
  to_go = np.cumsum(rewards[:, ::-1], axis=1)[:, ::-1]
  np.testing.assert_allclose(
    estimate.returns_BL, np.where(batch.loss_mask_BL, to_go, 0), atol=1e-12
  )


@VARIANTS
def test_whitening_changes_advantages_only(steps, observation_tokens):
  batch, _, _ = batches.make()
  plain = _estimate(batch, 'none', steps, observation_tokens)
  white = _estimate(batch, 'policy', steps, observation_tokens)
  np.testing.assert_allclose(
    white.advantages_BL,
    twins.whiten(np.asarray(plain.advantages_BL), batch.loss_mask_BL),
    rtol=1e-10,
  )
  np.testing.assert_array_equal(white.returns_BL, plain.returns_BL)


def test_whitening_all_includes_observation_tokens():
  batch, _, _ = batches.make()
  mask = batch.loss_mask_BL
  response = advantage_twins.response(mask)
  assert (response & ~mask).sum() > 5
  plain = np.zeros(mask.shape)
  for b, row in enumerate(response):
    rewards = np.where(mask, batch.rewards_BL, 0)[b, row]
    plain[b, row] = twins.gae(rewards, batch.values_BL[b, row], GAMMA, LAMBDA)
  expected = np.where(mask, twins.whiten(plain, response), 0)
  actual = _estimate(batch, 'all', observation_tokens='included')
  np.testing.assert_allclose(actual.advantages_BL, expected, rtol=1e-10)
  policy = _estimate(batch, 'policy', observation_tokens='included')
  assert np.abs(actual.advantages_BL - policy.advantages_BL).max() > 0.01
  _agree(actual, policy, ('returns_BL', 'value_mask_BL'))


@pytest.mark.parametrize('steps', ['turn', 'bilevel'])
def test_whitening_all_lets_an_observation_repeat_the_token_before(steps):
  batch, _, _ = batches.make()
  plain = np.array(_estimate(batch, steps=steps).advantages_BL)
  response = advantage_twins.response(batch.loss_mask_BL)
  for b, i in np.argwhere(response & ~batch.loss_mask_BL):
    plain[b, i] = plain[b, i - 1]
  expected = np.where(batch.loss_mask_BL, twins.whiten(plain, response), 0)
  actual = _estimate(batch, 'all', steps)
  np.testing.assert_allclose(actual.advantages_BL, expected, rtol=1e-10)


@VARIANTS
def test_failed_row_is_an_absent_row(steps, observation_tokens):
  batch, _, _ = batches.make()
  present = np.arange(batches.B) != batches.FAILED_ROW
  whole = _estimate(batch, 'policy', steps, observation_tokens)
  without = _estimate(
    batches.rows(batch, present), 'policy', steps, observation_tokens
  )
  for name in FIELDS:
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


@functools.cache
def _value_and_gradient(steps):
  def total(arrays, batch):
    batch = batch.replace(**arrays)
    out = _estimate(batch, 'policy', steps)
    weight = jnp.arange(batches.L, dtype=float)[None]
    # Every element of the output is compared: off the mask they must be 0.
    return jnp.sum(weight * (out.advantages_BL**2 + out.returns_BL))

  return jax.jit(jax.value_and_grad(total))


@pytest.mark.parametrize('value', [np.nan, np.inf])
@pytest.mark.parametrize('steps', gae.STEPS)
def test_poison_off_the_mask_changes_nothing(steps, value):
  batch, _, _ = batches.make()

  def run(batch):
    arrays = {'values_BL': batch.values_BL, 'rewards_BL': batch.rewards_BL}
    return _value_and_gradient(steps)(arrays, batch)

  clean, clean_gradient = run(batch)
  poisoned, gradient = run(batches.poison(batch, value))
  np.testing.assert_array_equal(poisoned, clean)
  jax.tree.map(np.testing.assert_array_equal, gradient, clean_gradient)
  for array in gradient.values():
    assert not np.asarray(array)[~batch.loss_mask_BL].any()


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
    np.testing.assert_array_equal(
      _estimate(poisoned, whiten, 'token', 'included').advantages_BL,
      _estimate(batch, whiten, 'token', 'included').advantages_BL,
    )


def test_an_unknown_option_is_a_type_error():
  batch, _, _ = batches.make()
  with pytest.raises(TypeError, match='lambd'):
    advantages.estimate_advantages(
      batch.rewards_BL,
      batch,
      name='gae',
      whiten='none',
      num_turns=batches.T,
      lambd=1.0,
    )


def test_missing_values_are_named():
  batch, _, _ = batches.make()
  with pytest.raises(ValueError, match='gae needs values_BL'):
    _estimate(batch.replace(values_BL=None))


@pytest.mark.parametrize('whiten', ['none', 'all'])
def test_monte_carlo_is_the_reward_to_go_and_needs_no_values(whiten):
  batch, _, _ = batches.make()
  mask = batch.loss_mask_BL
  plain = np.zeros(mask.shape)
  for b, row in enumerate(mask):
    to_go = 0.0
    for i in np.flatnonzero(row)[::-1]:
      to_go = batch.rewards_BL[b, i] + GAMMA * to_go
      plain[b, i] = to_go
  expected = plain
  if whiten == 'all':
    response = advantage_twins.response(mask)
    repeated = advantage_twins.repeated(plain, mask)
    expected = np.where(mask, twins.whiten(repeated, response), 0)
  batch = batches.poison(batch, np.nan).replace(values_BL=None)
  actual = advantages.estimate_advantages(
    batch.rewards_BL,
    batch,
    name='monte_carlo',
    whiten=whiten,
    num_turns=batches.T,
    gamma=GAMMA,
  )
  np.testing.assert_allclose(actual.advantages_BL, expected, rtol=1e-10)
  assert not np.any(actual.returns_BL)
  assert not np.any(actual.value_mask_BL)
