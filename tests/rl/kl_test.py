import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.rl import kl

MASK = np.ones((1, 3), bool)


@jax.jit
def _estimates(logprobs, reference):
  """Returns estimates and their slopes by estimator."""
  out = {}
  for name in kl.KL_ESTIMATORS:
    estimate = lambda x: kl.kl_estimate(x, reference, MASK, estimator=name)
    value, pull = jax.vjp(estimate, logprobs)
    out[name] = value, pull(jnp.ones_like(value))[0]
  return out


@pytest.mark.parametrize('estimator', ['k1', 'k3'])
def test_k1_and_k3_are_unbiased(estimator):
  policy = np.array([0.5, 0.3, 0.2])
  reference = np.array([0.2, 0.2, 0.6])
  found = _estimates(np.log(policy)[None], np.log(reference)[None])
  estimate, _ = np.asarray(found[estimator])
  divergence = np.sum(policy * np.log(policy / reference))
  np.testing.assert_allclose(np.sum(policy * estimate[0]), divergence)


def test_far_from_the_reference_k3_is_huge_and_k3_clamped_is_10():
  far = np.array([[-10.0, -2.0, 20.0]])
  found = _estimates(far, np.zeros_like(far))
  plain = np.asarray(found['k3'][0])
  assert plain[0, 0] == pytest.approx(22015.47, abs=0.01)
  assert 10 < plain[0, 2] < 20 and plain[0, 1] < 10
  clamped, slopes = found['k3_clamped']
  np.testing.assert_array_equal(clamped, np.minimum(plain, 10))
  np.testing.assert_allclose(slopes, [[0, 1 - math.exp(2), 0]])


@jax.jit
def _gradients(logits):
  """Returns those of the expected estimates, and of both divergences."""
  reference = np.log(np.array([[0.2, 0.2, 0.6]]))
  log_softmax = lambda logits: jax.nn.log_softmax(logits)[None]
  policy = jnp.exp(log_softmax(logits))  # samples come from it: data

  def expected(logits, estimator):
    logprobs = log_softmax(logits)
    return jnp.sum(
      policy * kl.kl_estimate(logprobs, reference, MASK, estimator=estimator)
    )

  def divergence(logits, forward):
    logprobs = log_softmax(logits)
    p, q = (logprobs, reference) if forward else (reference, logprobs)
    return jnp.sum(jnp.exp(p) * (p - q))

  return (
    {name: jax.grad(expected)(logits, name) for name in kl.KL_ESTIMATORS},
    *(jax.grad(divergence)(logits, forward) for forward in (True, False)),
  )


@pytest.mark.parametrize('estimator', ['k1', 'k2', 'k3', 'k3_clamped'])
def test_the_expected_gradient_of_an_estimate_in_the_loss(estimator):
  found, *divergences = _gradients(np.array([0.3, -0.2, 0.9]))
  to_reference, from_reference = map(np.asarray, divergences)
  assert np.abs(to_reference - from_reference).max() > 0.01
  np.testing.assert_allclose(
    found[estimator],
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
