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


def test_far_from_the_reference_k3_is_huge_and_k3_clamped_is_10():
  far = np.array([[-10.0, -2.0, 20.0]])
  found = _estimates(far, np.zeros_like(far))
  plain = np.asarray(found['k3'][0])
  assert plain[0, 0] == pytest.approx(22015.47, abs=0.01)
  assert 10 < plain[0, 2] < 20 and plain[0, 1] < 10
  clamped, slopes = found['k3_clamped']
  np.testing.assert_array_equal(clamped, np.minimum(plain, 10))
  np.testing.assert_allclose(slopes, [[0, 1 - math.exp(2), 0]])


REFERENCE = np.array([0.2, 0.2, 0.6])


@jax.jit
def _gradients(logits):
  """Returns the gradients of the expected estimates by the logits."""
  policy = jax.nn.softmax(logits)[None]  # samples come from it: data

  def expected(logits, estimator):
    logprobs = jax.nn.log_softmax(logits)[None]
    reference = np.log(REFERENCE)[None]
    return jnp.sum(
      policy * kl.kl_estimate(logprobs, reference, MASK, estimator=estimator)
    )

  return {name: jax.grad(expected)(logits, name) for name in kl.KL_ESTIMATORS}


def test_the_expected_gradient_of_an_estimate_in_the_loss():
  logits = np.array([0.3, -0.2, 0.9])
  policy = np.exp(logits) / np.exp(logits).sum()
  logs = np.log(policy / REFERENCE)
  to_reference = policy * (logs - policy @ logs)  # of KL(policy || reference)
  from_reference = policy - REFERENCE  # of KL(reference || policy)
  assert np.abs(to_reference - from_reference).max() > 0.01
  expected = {
    'k1': np.zeros(3),
    'k2': to_reference,
    'k3': from_reference,
    'k3_clamped': from_reference,
  }
  for name, gradient in _gradients(logits).items():
    np.testing.assert_allclose(gradient, expected[name], atol=1e-12)


@pytest.mark.parametrize(
  'coefficient,divergence', [(0.5, math.nan), (1.7e308, math.inf)]
)
def test_the_adaptive_coefficient_stays_finite(coefficient, divergence):
  new = kl.CONTROLLERS['adaptive'](
    coefficient, divergence, num_trajectories=512, target=6.0, horizon=100.0
  )
  assert new == coefficient
