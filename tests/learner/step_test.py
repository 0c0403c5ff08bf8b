"""An update is the same however it is split; bad input changes nothing."""

import dataclasses
import functools

import jax
from jax.extend import core as extend_core
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.rl import masking
from stppo_jax.rollout import pack
from tests import compilations
from tests.learner import updates
from tests.rl import batches

_BIAS = {
  'correction__clipping_bias__tau': 0.1,  # below the batch's rho: it scales
  'correction__clipping_bias__floor': 0.01,  # below the batch's norm: divides
}
_ALGORITHMS = {
  name: batches.algorithm(name, **_BIAS)
  for name in ('token_ppo', 'turn_ppo', 's_ppo', 'st_ppo')
} | {
  's_ppo, rows': batches.algorithm(
    's_ppo', aggregate__name='sequence_mean', **_BIAS
  ),
  'st_ppo, gradient, turns': batches.algorithm(
    'st_ppo',
    aggregate__name='turn_mean',
    correction__clipping_bias__norm='gradient',
    **_BIAS,
  ),
}
# Algorithms whose minibatch statistics are more than the four sums of the
# clipping-bias correction, or that have no value model.
_NEIGHBOURS = {
  'bapo': batches.algorithm('bapo', bounds__positive_share=0.6),
  'sspo': batches.algorithm('sspo'),
  'grpo_guard': batches.algorithm('grpo_guard'),
  'minirl': batches.algorithm('minirl'),
  'so_grpo': batches.algorithm('so_grpo', **_BIAS),
}
_MANY = {'mesh': (2, 2, 2), 'num_microbatches': 2}


def _assert_differ(one, other, models):
  """Asserts that both gradients are nonzero and differ."""
  for a, b in zip(
    updates.gradients(one, models), updates.gradients(other, models)
  ):
    norms = [
      np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(tree)))
      for tree in (a, b, jax.tree.map(np.subtract, a, b))
    ]
    assert min(norms) > 1e-3


@pytest.mark.parametrize(
  'name',
  [
    'st_ppo, gradient, turns',
    pytest.param('st_ppo', marks=pytest.mark.slow),
    pytest.param('s_ppo, rows', marks=pytest.mark.slow),
  ],
)
def test_eight_devices_and_two_microbatches_are_one(name):
  models, algorithm = updates.sums(), _ALGORITHMS[name]
  batch = updates.batch(models)
  one = updates.update(algorithm, batch, models)
  assert one.metrics['actor/pg_clipfrac'] > 0.05
  if algorithm.correction.names:
    gradient = algorithm.correction.clipping_bias.norm == 'gradient'
    assert (one.metrics['stab/bias_grad_norm'] > 0.02) == gradient
    assert (one.metrics['stab/scale'] != 1) != gradient
  many = updates.update(algorithm, batch, models, **_MANY)
  updates.assert_same(many, one, models)


def _num_products(jaxpr):
  """Returns the number of matrix products in a program and what it calls."""
  return sum(
    (equation.primitive.name == 'dot_general')
    + sum(map(_num_products, extend_core.jaxprs_in_params(equation.params)))
    for equation in jaxpr.eqns
  )


def test_only_the_gradient_norm_takes_further_backward_passes():
  models = updates.sums()

  def num_products(algorithm):
    program = updates.compiled(models, method=updates.method(algorithm)).trace(
      updates.train_state(models),
      {},
      updates.batch(models),
      updates.with_algorithm(updates.HYPERPARAMETERS, algorithm),
      None,
    )
    return _num_products(program.jaxpr)

  plain = num_products(_ALGORITHMS['token_ppo'])
  for name in ('turn_ppo', 's_ppo', 'st_ppo'):
    assert num_products(_ALGORITHMS[name]) == plain
  # The forward pass has one product in each of the two heads; all others are
  # of backward passes, of which the policy term, the bias and the other terms
  # have one each.
  forward = 2
  terms_apart = num_products(_ALGORITHMS['st_ppo, gradient, turns'])
  assert terms_apart - forward == 3 * (plain - forward) > 0


@pytest.mark.slow
def test_a_bias_norm_below_its_floor_divides_by_the_floor():
  """Policy and other terms add up to the gradient of their sum."""
  models = updates.sums()
  batch = updates.batch(models)
  turns = functools.partial(
    batches.algorithm, 'st_ppo', aggregate__name='turn_mean'
  )
  apart = turns(
    correction__clipping_bias__norm='gradient',
    correction__clipping_bias__floor=1.0,
  )
  summed = turns(correction__clipping_bias__tau=float('inf'))
  one = updates.update(apart, batch, models)
  assert 0 < one.metrics['stab/bias_grad_norm'] < 1
  for a, b in zip(
    updates.gradients(one, models),
    updates.gradients(updates.update(summed, batch, models), models),
  ):
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b
    )


@pytest.mark.slow
def test_outputs_at_the_loss_positions_suffice():
  models, algorithm = updates.sums(), _ALGORITHMS['st_ppo']
  batch = updates.batch(models)
  everywhere = updates.update(algorithm, batch, models)
  assert everywhere.metrics['stab/scale'] != 1  # the whole batch's statistic
  positions_BM = pack.loss_positions(batch.loss_mask_BL)
  batch = batch.replace(loss_positions_BM=positions_BM)
  models = models._replace(policy=dataclasses.replace(models.policy, chunk=8))
  there = updates.update(algorithm, batch, models, num_microbatches=2)
  updates.assert_same(there, everywhere, models)


@pytest.mark.slow
def test_a_critic_at_the_whole_response_learns_from_observations():
  models = updates.sums()
  batch = updates.batch(models)
  mask_BL = masking.response_mask(batch.loss_mask_BL)
  batch = batch.replace(
    loss_positions_BM=pack.loss_positions(batch.loss_mask_BL),
    value_mask_BL=np.asarray(mask_BL),
  )
  algorithm = batches.algorithm(
    'token_ppo',
    advantage__observation_tokens='included',
    advantage__critic_tokens='response',
  )
  there = updates.update(algorithm, batch, models)
  everywhere = updates.update(
    algorithm, batch.replace(loss_positions_BM=None), models
  )
  updates.assert_same(there, everywhere, models)
  # The returns of observations move the value model, and not the policy.
  off_BL = np.asarray(mask_BL) & ~batch.loss_mask_BL
  assert off_BL.any()
  other = batch.replace(returns_BL=batch.returns_BL + 3.0 * off_BL)
  moved = updates.update(algorithm, other, models)
  for name, changed in {'policy': False, 'value': True}.items():
    old, new = (
      jax.tree.leaves(getattr(x.state, name).params) for x in (there, moved)
    )
    differs = any(np.abs(a - b).max() > 1e-4 for a, b in zip(old, new))
    assert differs == changed


@pytest.mark.slow
@pytest.mark.parametrize(
  'name',
  [
    'bapo',
    pytest.param('grpo_guard', marks=pytest.mark.slow),
    pytest.param('sspo', marks=pytest.mark.slow),
    pytest.param('minirl', marks=pytest.mark.slow),
    pytest.param('so_grpo', marks=pytest.mark.slow),
  ],
)
def test_splits_change_nothing_for_an_algorithm_without_values(name):
  models, algorithm = updates.policy_alone(), _NEIGHBOURS[name]
  batch = updates.batch(updates.sums())
  one = updates.update(algorithm, batch, models)
  assert one.state.value is None
  assert not any('critic' in metric for metric in one.metrics)
  if name == 'bapo':
    assert one.metrics['bounds/high'] > 1.25  # it moved
  many = updates.update(algorithm, batch, models, **_MANY)
  updates.assert_same(many, one, models)


def test_failed_rows_change_nothing():
  models, algorithm = updates.sums(), _ALGORITHMS['st_ppo']
  whole = updates.batch(models)
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
  with_it = updates.update(algorithm, batch, models)
  # The other rows twice: it changes no mean, and the batch has as many rows.
  twice = updates.rows(whole, np.arange(updates.B) // 2 * 2)
  without = updates.update(algorithm, twice, models)
  updates.assert_same(with_it, without, models)
  _assert_differ(with_it, updates.update(algorithm, whole, models), models)


def _assert_unchanged(result, models):
  jax.tree.map(
    np.testing.assert_array_equal, result.state, updates.train_state(models)
  )


@pytest.mark.parametrize('value', [np.nan, np.inf])
@pytest.mark.parametrize('name', ['advantages_BL', 'returns_BL'])
def test_a_poisoned_minibatch_changes_nothing_and_is_counted(name, value):
  models, algorithm = updates.sums(), _ALGORITHMS['st_ppo']
  batch = updates.batch(models)
  healthy = updates.update(algorithm, batch, models)
  assert healthy.metrics['update/skipped'] == 0
  assert healthy.state.policy.updates == healthy.state.value.updates == 1
  poisoned_BL = getattr(batch, name).copy()
  poisoned_BL[0, 3] = value
  assert batch.loss_mask_BL[0, 3]
  poisoned = updates.update(
    algorithm, batch.replace(**{name: poisoned_BL}), models
  )
  assert poisoned.metrics['update/skipped'] == 1
  _assert_unchanged(poisoned, models)


@pytest.mark.parametrize(
  'num_microbatches', [1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_a_loss_that_is_not_finite_changes_nothing(num_microbatches):
  models, algorithm = updates.sums(), _ALGORITHMS['st_ppo']
  batch = updates.batch(models)
  far_BL = batch.returns_BL.copy()
  far_BL[0, 3] = 3e19  # its square overflows, and its gradient does not
  result = updates.update(
    algorithm,
    batch.replace(returns_BL=far_BL),
    models,
    num_microbatches=num_microbatches,
  )
  assert np.isfinite(result.metrics['actor/grad_norm'])
  assert np.isfinite(result.metrics['critic/grad_norm'])
  assert np.isinf(result.metrics['critic/vf_loss'])
  assert result.metrics['update/skipped'] == 1
  _assert_unchanged(result, models)


@pytest.mark.parametrize('model', ['policy_step', 'value_step'])
def test_new_weights_that_are_not_finite_change_nothing(model):
  models, algorithm = updates.sums(), _ALGORITHMS['st_ppo']
  batch = updates.batch(models)
  overflowing = updates.DESCENT._replace(learning_rate=3e38, weight_decay=9.0)
  result = updates.update(
    algorithm,
    batch,
    models,
    hyperparameters=updates.hyperparameters(**{model: overflowing}),
  )
  assert np.isfinite(result.metrics['actor/grad_norm'])
  assert np.isfinite(result.metrics['critic/grad_norm'])
  assert result.metrics['update/skipped'] == 1
  _assert_unchanged(result, models)


def test_a_policy_that_does_not_learn_keeps_its_bits():
  models, algorithm = updates.sums(), _ALGORITHMS['st_ppo']
  batch = updates.batch(models)
  hyperparameters = updates.hyperparameters(policy_learns=False)
  learned = updates.update(algorithm, batch, models)
  rested = updates.update(
    algorithm, batch, models, hyperparameters=hyperparameters
  )
  old = updates.train_state(models)
  jax.tree.map(np.testing.assert_array_equal, rested.state.policy, old.policy)
  jax.tree.map(
    np.testing.assert_array_equal, rested.state.value, learned.state.value
  )
  assert rested.state.value.updates == 1
  assert rested.metrics == learned.metrics


def test_other_hyperparameters_do_not_recompile():
  models, batch = updates.sums(), updates.batch(updates.sums())
  first = updates.update(_ALGORITHMS['st_ppo'], batch, models)
  changes = (
    ('bounds__clip_low', 0.05),
    ('correction__clipping_bias__tau', float('inf')),
  )
  slow = updates.DESCENT._replace(learning_rate=0.5, max_grad_norm=0.01)
  with compilations.counted() as programs:
    changed = [
      updates.update(
        batches.algorithm('st_ppo', **(_BIAS | {path: value})), batch, models
      )
      for path, value in changes
    ]
    slowed = updates.update(
      _ALGORITHMS['st_ppo'],
      batch,
      models,
      hyperparameters=updates.hyperparameters(policy_step=slow, value_clip=0.1),
    )
  assert not programs
  norm = first.metrics['actor/grad_norm']
  for result in changed:
    assert abs(result.metrics['actor/grad_norm'] - norm) > 1e-4
  gradient, _ = updates.gradients(slowed, models)
  squares = sum(np.sum(x**2) for x in jax.tree.leaves(gradient))
  np.testing.assert_allclose(np.sqrt(squares), 0.5 * 0.01, rtol=1e-3)


@functools.partial(jax.jit, static_argnums=2)
def _policy_gradient(weights_BL, batch, models):
  """Returns the gradient of -sum(weights * log pi) / N."""

  def loss(params):
    logprobs_BL, _ = models.policy.logprobs_and_entropy(
      params, batch.tokens_BL, temperature=1.0
    )
    chosen_BL = jnp.where(batch.loss_mask_BL, weights_BL * logprobs_BL, 0.0)
    return -jnp.sum(chosen_BL) / batch.loss_mask_BL.sum()

  return jax.grad(loss)(updates.train_state(models).policy.params)


def _turn_means(x_BL, turn_ids_BL):
  """Returns the mean of each turn at its tokens, by a loop."""
  means_BL = np.zeros_like(x_BL)
  for b, row in enumerate(turn_ids_BL):
    for turn in range(1, row.max() + 1):
      means_BL[b, row == turn] = x_BL[b, row == turn].mean()
  return means_BL


@pytest.mark.parametrize('name', ['token_ppo', 'st_ppo'])
def test_at_the_old_policy_the_update_is_the_policy_gradient(name):
  models, algorithm = updates.sums(), _ALGORITHMS[name]
  batch = updates.batch(models, spread=0.0)
  hyperparameters = updates.hyperparameters(entropy=0.0)
  result = updates.update(
    algorithm, batch, models, hyperparameters=hyperparameters
  )
  for level in ('token', 'turn', 'sequence'):
    for extreme in ('min', 'max'):
      ratio = result.metrics[f'ratio/{level}/{extreme}']
      assert abs(ratio - 1) < 1e-6
  assert result.metrics['actor/pg_clipfrac'] == 0
  assert result.metrics['stab/scale'] == 1
  weights_BL = batch.advantages_BL
  if algorithm.ratio.level == 'turn':
    weights_BL = _turn_means(weights_BL, batch.turn_ids_BL)
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6),
    updates.gradients(result, models)[0],
    _policy_gradient(weights_BL, batch, models),
  )


def _indifferent(models):
  """Returns a batch without advantages: only entropy and KL act."""
  batch = updates.batch(models, spread=0.0)
  return batch.replace(advantages_BL=np.zeros_like(batch.advantages_BL))


def test_the_entropy_bonus_raises_entropy():
  models, algorithm = updates.sums(), _ALGORITHMS['st_ppo']
  entropies = {}
  for coefficient in (-0.5, 0.0, 0.5):
    state = updates.train_state(models)
    for _ in range(2):  # the second reports the policy after the first
      hyperparameters = updates.hyperparameters(entropy=coefficient)
      state, metrics = updates.update(
        algorithm,
        _indifferent(models),
        models,
        state=state,
        hyperparameters=hyperparameters,
      )
    entropies[coefficient] = metrics['actor/entropy']
  assert entropies[-0.5] < entropies[0.0] - 0.001
  assert entropies[0.5] > entropies[0.0] + 0.001
