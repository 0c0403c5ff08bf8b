import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.configs import defaults
from stppo_jax.rl import loss_context
from stppo_jax.rl import objectives
from tests.rl import batches

#                  below  inside  above, for A > 0 and then A < 0
RATIO = np.array([[0.5, 1.1, 1.5, 0.5, 1.1, 1.5]])
ADVANTAGES = np.array([[2.0, 2.0, 2.0, -2.0, -2.0, -2.0]])
LOGPROBS = np.array([[-1.0, -2.0, -3.0, -1.0, -2.0, -3.0]])


def _objective(
  name, ratio, advantages, logprobs=None, level='token', **options
):
  """Returns an objective for one turn per row, with the bounds 0.8 and 1.2."""
  logprobs = np.zeros(ratio.shape) if logprobs is None else logprobs
  batch, _, _ = batches.make()
  batch = batch.replace(
    loss_mask_BL=np.ones(ratio.shape, bool),
    turn_ids_BL=np.ones(ratio.shape, np.int32),
    old_logprobs_BL=LOGPROBS,
  )
  context = loss_context.LossContext(
    lambda level: ratio, level, advantages, None, logprobs, batch, num_turns=1
  )
  choice = objectives.OBJECTIVES[name]
  options = defaults.DEFAULTS['objective'][name] | options
  statistics = ()
  if choice.statistics is not None:
    statistics = choice.statistics(context, 0.8, 1.2, **options)
  return choice.function(context, 0.8, 1.2, statistics, **options)


def _pessimistic(ratio, advantages):
  return _objective('pessimistic', ratio, advantages)


def test_a_ratio_on_the_bound_keeps_its_whole_gradient():
  ratio = np.array([[0.8, 1.2]])
  advantages = np.array([[-1.0, 1.0]])
  gradient = jax.grad(lambda r: jnp.sum(_pessimistic(r, advantages)[0]))(ratio)
  np.testing.assert_array_equal(gradient, -advantages)


def test_a_quadratic_gradient_ends_where_the_probability_changed_enough():
  """It is that of -A r, times what is left of the threshold."""
  found = jax.grad(
    lambda r: jnp.sum(_objective('quadratic', r, ADVANTAGES, threshold=0.05)[0])
  )(RATIO)
  change = np.exp(LOGPROBS) * (RATIO - 1)
  left = 1 - np.sign(ADVANTAGES) * change / 0.05
  np.testing.assert_allclose(found, -ADVANTAGES * left, rtol=1e-12)
  assert left.min() < 0 < left.max()  # beyond it the gradient turns back


def _of(name, **options):
  def run(ratio, logprobs):
    return _objective(name, ratio, ADVANTAGES, logprobs, **options)

  return run


def test_a_share_of_the_tokens_between_two_covariances_is_cut():
  rng = np.random.default_rng(0)
  shape = (40, 50)
  advantages, logprobs = rng.normal(size=shape), -rng.exponential(size=shape)
  old = logprobs + 0.1 * rng.normal(size=shape)

  def cut(rows=slice(None), **options):
    clip_cov = objectives.OBJECTIVES['clip_cov']
    options = {'share': 0.05, 'least': 0.5, 'most': 2.0} | options

    @jax.jit
    def run():
      whole = context(slice(None))
      found = clip_cov.statistics(whole, 0.0, 9.0, **options)
      return clip_cov.function(context(rows), 0.0, 9.0, found, **options)[1]

    return np.asarray(run())

  def context(rows):
    batch, _, _ = batches.make()
    batch = batch.replace(
      loss_mask_BL=np.ones(shape, bool)[rows], old_logprobs_BL=old[rows]
    )
    return loss_context.LossContext(
      lambda level: np.ones(shape)[rows],
      'token',
      advantages[rows],
      None,
      logprobs[rows],
      batch,
      num_turns=1,
    )

  covariance = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
  eligible = (covariance > 0.5) & (covariance < 2)
  chosen = cut()
  assert chosen.sum() == 100 < eligible.sum() < 1000
  assert not np.any(chosen & ~eligible)
  # The choice is random: neither the highest, nor those of the first rows.
  share = chosen.sum() / eligible.sum()
  assert abs(chosen[:20].sum() / eligible[:20].sum() - share) < 0.1
  high = eligible & (covariance > 1)
  assert abs(chosen[high].mean() - share) < 0.1
  # Neither the order of rows nor microbatches change it.
  order = rng.permutation(40)
  np.testing.assert_array_equal(cut(order), chosen[order])
  np.testing.assert_array_equal(cut(slice(30, 40)), chosen[30:])
  np.testing.assert_array_equal(cut(share=1.0), eligible)


@pytest.mark.parametrize('sign', [1, -1])
@pytest.mark.parametrize(('share', 'count'), [(1e-6, 1), (0.34, 2), (0.9, 5)])
def test_rounding_in_another_program_changes_no_choice(share, count, sign):
  advantages = np.array([[1.0, 2.0, -1.0, -3.0, 0.5, 0.1]])
  kl_cov = objectives.OBJECTIVES['kl_cov']
  options = {'share': share, 'coefficient': 1.0}

  def context(logprobs):
    batch, _, _ = batches.make()
    batch = batch.replace(loss_mask_BL=np.ones((1, 6), bool))
    return loss_context.LossContext(
      lambda level: np.full((1, 6), np.e),
      'token',
      advantages,
      None,
      logprobs,
      batch,
      num_turns=1,
    )

  found = kl_cov.statistics(context(LOGPROBS), 0.8, 1.2, **options)
  other = LOGPROBS * (1 + sign * 1e-12)
  term, _ = kl_cov.function(context(other), 0.8, 1.2, found, **options)
  penalty = np.round(term + advantages * np.e, 9)
  assert sorted(penalty[0]) == [0] * (6 - count) + [1] * count
