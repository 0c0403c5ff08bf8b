"""An update is the same however it is split; bad input changes nothing."""

import jax
from jax.extend import core as extend_core
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.rl import masking
from stppo_jax.rollout import pack
from tests import compilations
from tests.learner import trees
from tests.learner import updates
from tests.rl import batches

_ALGORITHMS = {
  'token_ppo': batches.algorithm('token_ppo'),
  'st_ppo': batches.algorithm('st_ppo', **updates.BIAS),
  'st_ppo, gradient': batches.algorithm(
    'st_ppo', correction__clipping_bias__norm='gradient', **updates.BIAS
  ),
  's_ppo, rows': batches.algorithm(
    's_ppo', aggregate__name='sequence_mean', **updates.BIAS
  ),
  # It has further statistics of the minibatch, and no value model.
  'bapo': batches.algorithm('bapo', bounds__positive_share=0.6),
}


def _update(batch, **options):
  return updates.update(_ALGORITHMS['st_ppo'], batch, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
  'name', ['st_ppo', 'st_ppo, gradient', 's_ppo, rows', 'bapo']
)
def test_eight_devices_and_two_microbatches_are_one(name):
  algorithm, batch = _ALGORITHMS[name], updates.batch()
  models = updates.sums() if name != 'bapo' else updates.policy_alone()
  one = updates.update(algorithm, batch, models)
  assert one.metrics['actor/pg_clipfrac'] > 0.05
  gradient = name == 'st_ppo, gradient'
  assert (one.metrics['stab/bias_grad_norm'] > 0.02) == gradient
  if name == 'bapo':
    assert one.metrics['bounds/high'] > 1.25  # it moved
    assert one.state.value is None
    assert not any('critic' in metric for metric in one.metrics)
  else:
    assert (one.metrics['stab/scale'] != 1) != gradient
  many = updates.update(algorithm, batch, models, **updates.MANY)
  updates.assert_same(many, one, models)


def _num_products(jaxpr):
  """Returns the number of matrix products in a program and what it calls."""
  return sum(
    (equation.primitive.name == 'dot_general')
    + sum(map(_num_products, extend_core.jaxprs_in_params(equation.params)))
    for equation in jaxpr.eqns
  )


def test_only_the_gradient_norm_takes_further_backward_passes():
  def num_products(algorithm):
    program = updates.traced(
      updates.sums(),
      updates.batch(),
      inputs=updates.with_algorithm(updates.HYPERPARAMETERS, algorithm),
      method=updates.method(algorithm),
    )
    return _num_products(program.jaxpr)

  plain = num_products(_ALGORITHMS['token_ppo'])
  assert num_products(_ALGORITHMS['st_ppo']) == plain
  # The forward pass has one product in each of the two heads; all others are
  # of backward passes, of which the policy term, the bias and the other terms
  # have one each.
  forward = 2
  terms_apart = num_products(_ALGORITHMS['st_ppo, gradient'])
  assert terms_apart - forward == 3 * (plain - forward) > 0


def test_three_terms_on_eight_devices_give_the_gradient_of_one():
  """Below its floor, a norm divides policy and other terms by the same number.

  They then add up to the gradient of their sum.
  """
  bias, batch = 'correction__clipping_bias__', updates.batch()
  apart = batches.algorithm(
    'st_ppo', **{f'{bias}norm': 'gradient', f'{bias}floor': 1.0}
  )
  summed = batches.algorithm('st_ppo', **{f'{bias}tau': float('inf')})
  many = updates.update(apart, batch, **updates.MANY)
  assert 0 < many.metrics.pop('stab/bias_grad_norm') < 1
  one = updates.update(summed, batch)
  assert one.metrics.pop('stab/bias_grad_norm') == 0
  updates.assert_same(many, one)


@pytest.mark.slow
def test_a_critic_at_the_whole_response_learns_from_observations():
  batch = updates.batch()
  mask_BL = masking.response_mask(batch.loss_mask_BL)
  batch = batch.replace(
    loss_positions_BM=pack.loss_positions(batch.loss_mask_BL),
    value_mask_BL=np.asarray(mask_BL),
  )
  # The returns of observations move the value model, and not the policy.
  off_BL = np.asarray(mask_BL) & ~batch.loss_mask_BL
  assert off_BL.any()
  there, everywhere, moved = (
    updates.update(
      batches.algorithm(
        'token_ppo',
        advantage__observation_tokens='included',
        advantage__critic_tokens='response',
      ),
      x,
    )
    for x in (
      batch,
      batch.replace(loss_positions_BM=None),
      batch.replace(returns_BL=batch.returns_BL + 3.0 * off_BL),
    )
  )
  updates.assert_same(there, everywhere)
  gradients = map(updates.gradients, (there, moved))
  policy, value = map(trees.norm, trees.subtract(*gradients))
  assert policy < 1e-6 and value > 1e-3


def test_failed_rows_change_nothing():
  whole = updates.batch()
  failed = np.arange(updates.B) % 2 == 1
  nothing = lambda mask_BL: mask_BL & ~failed[:, None]
  batch = whole.replace(
    loss_mask_BL=nothing(whole.loss_mask_BL),
    value_mask_BL=nothing(whole.value_mask_BL),
  )
  for name in ('old_logprobs', 'ref_logprobs', 'values', 'advantages'):
    x_BL = getattr(batch, f'{name}_BL').copy()
    x_BL[failed] = np.nan
    batch = batch.replace(**{f'{name}_BL': x_BL})
  with_it = _update(batch)
  # The other rows twice: it changes no mean, and the batch has as many rows.
  twice = updates.rows(whole, np.arange(updates.B) // 2 * 2)
  updates.assert_same(with_it, _update(twice))
  # All rows have another gradient.
  one, other = map(updates.gradients, (with_it, _update(whole)))
  for x in (*one, *other, *trees.subtract(one, other)):
    assert trees.norm(x) > 1e-3


def _assert_skipped(result):
  assert result.metrics['update/skipped'] == 1
  trees.assert_equal(result.state, updates.train_state())


def _norms(result):
  """Returns the norms of the gradients of policy and value model."""
  return [result.metrics[f'{name}/grad_norm'] for name in ('actor', 'critic')]


@pytest.mark.parametrize('value', [np.nan, np.inf])
@pytest.mark.parametrize('name', ['advantages_BL', 'returns_BL'])
def test_a_poisoned_minibatch_changes_nothing_and_is_counted(name, value):
  batch = updates.batch()
  healthy = _update(batch)
  assert healthy.metrics['update/skipped'] == 0
  assert healthy.state.policy.updates == healthy.state.value.updates == 1
  poisoned_BL = getattr(batch, name).copy()
  poisoned_BL[0, 3] = value
  assert batch.loss_mask_BL[0, 3]
  _assert_skipped(_update(batch.replace(**{name: poisoned_BL})))


@pytest.mark.parametrize(
  'num_microbatches', [1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_a_loss_that_is_not_finite_changes_nothing(num_microbatches):
  batch = updates.batch()
  far_BL = batch.returns_BL.copy()
  far_BL[0, 3] = 3e19  # its square overflows, and its gradient does not
  result = _update(
    batch.replace(returns_BL=far_BL), num_microbatches=num_microbatches
  )
  assert np.isfinite(_norms(result)).all()
  assert np.isinf(result.metrics['critic/vf_loss'])
  _assert_skipped(result)


@pytest.mark.parametrize('model', ['policy', 'value'])
def test_steps_that_are_not_sound_change_neither_model(model):
  def update(**changes):
    step = {f'{model}_step': updates.DESCENT._replace(**changes)}
    numbers = updates.hyperparameters(**step)
    return _update(updates.batch(), hyperparameters=numbers)

  overflowing = update(learning_rate=3e38, weight_decay=9.0)
  assert np.isfinite(_norms(overflowing)).all()
  _assert_skipped(overflowing)
  norm = _norms(overflowing)[model == 'value']
  _assert_skipped(update(skip_grad_norm=norm / 2))
  assert update(skip_grad_norm=2 * norm).metrics['update/skipped'] == 0


def test_a_policy_that_does_not_learn_keeps_its_bits():
  learned, rested = (
    _update(
      updates.batch(),
      hyperparameters=updates.hyperparameters(policy_learns=learns),
    )
    for learns in (True, False)
  )
  trees.assert_equal(rested.state.policy, updates.train_state().policy)
  trees.assert_equal(rested.state.value, learned.state.value)
  assert rested.state.value.updates == 1
  assert rested.metrics == learned.metrics


def test_other_hyperparameters_do_not_recompile():
  batch = updates.batch()
  first = _update(batch)
  slow = updates.DESCENT._replace(learning_rate=0.5, max_grad_norm=0.01)
  with compilations.counted() as programs:
    changed = [
      updates.update(
        batches.algorithm('st_ppo', **updates.BIAS | changes), batch
      )
      for changes in (
        {'bounds__clip_low': 0.05},
        {'correction__clipping_bias__tau': float('inf')},
      )
    ]
    slowed = _update(
      batch,
      hyperparameters=updates.hyperparameters(policy_step=slow, value_clip=0.1),
    )
  assert not programs
  for result in changed:
    assert abs(_norms(result)[0] - _norms(first)[0]) > 1e-4
  gradient, _ = updates.gradients(slowed)
  np.testing.assert_allclose(trees.norm(gradient), 0.5 * 0.01, rtol=1e-3)


@jax.jit
def _policy_gradient(weights_BL, batch):
  """Returns the gradient of -sum(weights * log pi) / N."""

  def loss(params):
    logprobs_BL, _ = updates.sums().policy.logprobs_and_entropy(
      params, batch.tokens_BL, temperature=1.0
    )
    chosen_BL = jnp.where(batch.loss_mask_BL, weights_BL * logprobs_BL, 0.0)
    return -jnp.sum(chosen_BL) / batch.loss_mask_BL.sum()

  return jax.grad(loss)(updates.train_state().policy.params)


def _turn_means(x_BL, turn_ids_BL):
  """Returns the mean of each turn at its tokens, by a loop."""
  means_BL = np.zeros_like(x_BL)
  for b, row in enumerate(turn_ids_BL):
    for turn in range(1, row.max() + 1):
      means_BL[b, row == turn] = x_BL[b, row == turn].mean()
  return means_BL


@pytest.mark.parametrize(
  'name', [pytest.param('token_ppo', marks=pytest.mark.slow), 'st_ppo']
)
def test_at_the_old_policy_the_update_is_the_policy_gradient(name):
  batch = updates.batch(spread=0.0)
  result = updates.update(
    _ALGORITHMS[name],
    batch,
    hyperparameters=updates.hyperparameters(entropy=0.0),
  )
  for level in ('token', 'turn', 'sequence'):
    for extreme in ('min', 'max'):
      ratio = result.metrics[f'ratio/{level}/{extreme}']
      assert abs(ratio - 1) < 1e-6
  assert result.metrics['actor/pg_clipfrac'] == 0
  assert result.metrics['stab/scale'] == 1
  weights_BL = batch.advantages_BL
  if name == 'st_ppo':
    weights_BL = _turn_means(weights_BL, batch.turn_ids_BL)
  trees.assert_close(
    updates.gradients(result)[0], _policy_gradient(weights_BL, batch)
  )


def test_the_entropy_bonus_raises_entropy():
  # Without advantages only entropy and KL act.
  batch = updates.batch(spread=0.0)
  batch = batch.replace(advantages_BL=np.zeros_like(batch.advantages_BL))
  entropies = []
  for coefficient in (-0.5, 0.0, 0.5):
    state = None
    for _ in range(2):  # the second reports the policy after the first
      hyperparameters = updates.hyperparameters(entropy=coefficient)
      state, metrics = _update(
        batch, state=state, hyperparameters=hyperparameters
      )
    entropies.append(metrics['actor/entropy'])
  assert min(np.diff(entropies)) > 0.001
