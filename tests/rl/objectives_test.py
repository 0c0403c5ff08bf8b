import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.configs import defaults
from stppo_jax.rl import objectives
from tests.rl import batches

#                  below  inside  above, for A > 0 and then A < 0
RATIO = np.array([[0.5, 1.1, 1.5, 0.5, 1.1, 1.5]])
ADVANTAGES = np.array([[2.0, 2.0, 2.0, -2.0, -2.0, -2.0]])
LOGPROBS = np.array([[-1.0, -2.0, -3.0, -1.0, -2.0, -3.0]])


def _objective(name, ratio, advantages, **options):
  """Returns terms, and what is cut, of one turn per row; bounds 0.8 and 1.2."""
  context = batches.context(ratio, advantages, LOGPROBS[:, : ratio.size])
  options = defaults.DEFAULTS['objective'][name] | options
  function = objectives.OBJECTIVES[name].function
  return function(context, 0.8, 1.2, (), **options)


def test_a_ratio_on_the_bound_keeps_its_whole_gradient():
  ratio = np.array([[0.8, 1.2]])
  advantages = np.array([[-1.0, 1.0]])
  run = jax.grad(lambda r: jnp.sum(_objective('pessimistic', r, advantages)[0]))
  gradient = jax.jit(run)(ratio)
  np.testing.assert_array_equal(gradient, -advantages)


def test_a_quadratic_gradient_ends_where_the_probability_changed_enough():
  """It is that of -A r, times what is left of the threshold."""
  run = jax.grad(
    lambda r: _objective('quadratic', r, ADVANTAGES, threshold=0.05)[0].sum()
  )
  found = jax.jit(run)(RATIO)
  change = np.exp(LOGPROBS) * (RATIO - 1)
  left = 1 - np.sign(ADVANTAGES) * change / 0.05
  np.testing.assert_allclose(found, -ADVANTAGES * left, rtol=1e-12)
  assert left.min() < 0 < left.max()  # beyond it the gradient turns back


def test_a_share_of_the_tokens_between_two_covariances_is_cut():
  rng = np.random.default_rng(0)
  shape = (40, 50)
  advantages, logprobs = rng.normal(size=shape), -rng.exponential(size=shape)
  old = logprobs + 0.1 * rng.normal(size=shape)

  clip_cov = objectives.OBJECTIVES['clip_cov']
  limits = {'least': 0.5, 'most': 2.0}

  @jax.jit
  def statistics(arrays, share):
    whole = batches.context(np.ones(shape), *arrays)
    return clip_cov.statistics(whole, 0.0, 9.0, share=share, **limits)

  @jax.jit
  def function(arrays, found, share):
    context = batches.context(np.ones(arrays[0].shape), *arrays)
    options = {'share': share, **limits}
    return clip_cov.function(context, 0.0, 9.0, found, **options)[1]

  def cut(rows=slice(None), share=0.05):
    arrays = advantages, old, logprobs
    found = statistics(arrays, share)
    return np.asarray(function([x[rows] for x in arrays], found, share))

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


_KL_COV = objectives.OBJECTIVES['kl_cov']


def _mixed(logprobs):
  """Returns a context with advantages of both signs and the ratio e."""
  advantages = np.array([[1.0, 2.0, -1.0, -3.0, 0.5, 0.1]])
  return batches.context(np.full((1, 6), np.e), advantages, 0.0, logprobs)


@jax.jit
def _kl_cov_statistics(logprobs, options):
  return _KL_COV.statistics(_mixed(logprobs), 0.8, 1.2, **options)


@jax.jit
def _kl_cov_terms(logprobs, found, options):
  return _KL_COV.function(_mixed(logprobs), 0.8, 1.2, found, **options)[0]


@pytest.mark.parametrize('sign', [1, -1])
@pytest.mark.parametrize(('share', 'count'), [(1e-6, 1), (0.34, 2), (0.9, 5)])
def test_rounding_in_another_program_changes_no_choice(share, count, sign):
  options = {'share': share, 'coefficient': 1.0}
  found = _kl_cov_statistics(LOGPROBS, options)
  other = LOGPROBS * (1 + sign * 1e-12)
  term = np.asarray(_kl_cov_terms(other, found, options))
  penalty = np.round(term + _mixed(other).advantages_BL * np.e, 9)
  assert sorted(penalty[0]) == [0] * (6 - count) + [1] * count
