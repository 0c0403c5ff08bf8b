import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.rl import kl

X = np.array([[0.5, -1.0, 0.0, 30.0]])
MASK = np.array([[True, True, True, False]])


def _estimate(x, estimator):
  return kl.kl_estimate(x, np.zeros_like(X), MASK, estimator=estimator)


@pytest.mark.parametrize('estimator', ['k1', 'k3'])
def test_k1_and_k3_are_unbiased(estimator):
  policy = np.array([0.5, 0.3, 0.2])
  reference = np.array([0.2, 0.2, 0.6])
  estimate = kl.kl_estimate(
    np.log(policy)[None],
    np.log(reference)[None],
    np.ones((1, 3), bool),
    estimator=estimator,
  )
  divergence = np.sum(policy * np.log(policy / reference))
  np.testing.assert_allclose(np.sum(policy * estimate[0]), divergence)


def test_far_from_the_reference_k3_is_huge_and_k3_clamped_is_10():
  far = np.array([[-10.0, -2.0, 20.0, 0.0]])
  plain = np.asarray(_estimate(far, 'k3'))
  assert plain[0, 0] == pytest.approx(22015.47, abs=0.01)
  assert 10 < plain[0, 2] < 20 and plain[0, 1] < 10
  clamped = _estimate(far, 'k3_clamped')
  np.testing.assert_array_equal(clamped, np.minimum(plain, 10))
  slopes = jax.grad(lambda x: jnp.sum(_estimate(x, 'k3_clamped')))(far)
  np.testing.assert_allclose(slopes, [[0, 1 - math.exp(2), 0, 0]])


def _log_softmax(logits):
  return jax.nn.log_softmax(logits)[None]


@pytest.mark.parametrize('estimator', ['k1', 'k2', 'k3', 'k3_clamped'])
def test_the_expected_gradient_of_an_estimate_in_the_loss(estimator):
  logits = np.array([0.3, -0.2, 0.9])
  reference = np.log(np.array([[0.2, 0.2, 0.6]]))
  everywhere = np.ones((1, 3), bool)
  policy = np.exp(_log_softmax(logits))  # samples come from it: data

  def expected(logits):
    estimate = kl.kl_estimate(
      _log_softmax(logits), reference, everywhere, estimator=estimator
    )
    return jnp.sum(policy * estimate)

  def divergence(logits, forward):
    logprobs = _log_softmax(logits)
    p, q = (logprobs, reference) if forward else (reference, logprobs)
    return jnp.sum(jnp.exp(p) * (p - q))

  to_reference, from_reference = (
    jax.grad(divergence)(logits, forward) for forward in (True, False)
  )
  assert np.abs(to_reference - from_reference).max() > 0.01
  np.testing.assert_allclose(
    jax.grad(expected)(logits),
    {
      'k1': np.zeros(3),
      'k2': to_reference,
      'k3': from_reference,
      'k3_clamped': from_reference,
    }[estimator],
    atol=1e-12,
  )


@pytest.mark.parametrize(
  'coefficient,divergence', [(0.5, math.nan), (1.7e308, math.inf)]
)
def test_the_adaptive_coefficient_stays_finite(coefficient, divergence):
  new = kl.CONTROLLERS['adaptive'](
    coefficient, divergence, num_trajectories=512, target=6.0, horizon=100.0
  )
  assert new == coefficient
