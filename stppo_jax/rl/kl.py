"""Estimates of KL(pi || reference) from one sampled token, and the penalty.

With x = log pi - log reference of the sampled token:

  k1 = x                   unbiased; in the loss its gradient has expectation
                           0, so it belongs in the reward
  k2 = x^2 / 2             biased, low variance
  k3 = exp(-x) - 1 + x     unbiased, never negative
  k3_clamped = min(k3, 10)

An unbiased estimate need not have an unbiased gradient in a loss. On policy,
the expected gradient of k1 is 0. The expected gradient of k2 is the gradient of
KL(pi || reference). The expected gradient of k3 is the gradient of the other
direction, KL(reference || pi).

k3 grows as exp(-x): one token with x = -10 counts 22,015. In the loss, verl,
Search-R1 and the reference implementation of arXiv 2511.20718 clamp k3 to
[-10, 10], and TRL does not. A clamped token has no gradient.

Source: J. Schulman, "Approximating KL divergence", 2020.
"""

import math

import chex
import jax
import jax.numpy as jnp

from stppo_jax.rl import options
from stppo_jax.rl import ratios

Array = jax.Array


def _k1(x_BL):
  return x_BL


def _k2(x_BL):
  return 0.5 * jnp.square(x_BL)


def _k3(x_BL):
  return jnp.expm1(-x_BL) + x_BL


K3_LIMIT = 10.0  # in nats; verl has the same limit


def _k3_clamped(x_BL):
  k3_BL = _k3(x_BL)
  # k3 is never negative, so only the upper limit matters.
  return jnp.where(k3_BL > K3_LIMIT, K3_LIMIT, k3_BL)


KL_ESTIMATORS = {'k1': _k1, 'k2': _k2, 'k3': _k3, 'k3_clamped': _k3_clamped}
KL_PLACES = ('reward', 'loss', 'nowhere')


def kl_estimate(
  logprobs_BL: Array,
  ref_logprobs_BL: Array,
  loss_mask_BL: Array,
  *,
  estimator: str,
) -> Array:
  """Returns the estimated divergence at each token in nats, 0 off the mask.

  Args:
    logprobs_BL: log pi of the tokens, differentiable. x, the difference from
      the reference, is clipped to [-20, 20].
    ref_logprobs_BL: the same tokens' log-probabilities under the reference; no
      gradient flows into them.
    loss_mask_BL: bool, the tokens that have an estimate.
    estimator: a key of `KL_ESTIMATORS`.
  """
  x_BL = ratios.token_log_ratio(logprobs_BL, ref_logprobs_BL, loss_mask_BL)
  return KL_ESTIMATORS[estimator](x_BL)


def penalized_rewards(
  rewards_BL: Array,
  kl_BL: Array,
  loss_mask_BL: Array,
  *,
  coefficient: Array | float,
) -> Array:
  """Returns rewards - coefficient * kl on the mask, 0 elsewhere."""
  chex.assert_equal_shape([rewards_BL, kl_BL, loss_mask_BL])
  zero_BL = jnp.zeros_like(rewards_BL)
  rewards_BL = jnp.where(loss_mask_BL, rewards_BL, zero_BL)
  return rewards_BL - coefficient * jnp.where(loss_mask_BL, kl_BL, zero_BL)


def adaptive_coefficient(
  coefficient: float,
  kl: float,
  *,
  num_trajectories: int,
  target: float,
  horizon: float,
) -> float:
  """Returns the coefficient for the next step.

    e = clip(kl / target - 1, -0.2, 0.2)
    coefficient * (1 + e * num_trajectories / horizon)

  Source: arXiv 1909.08593 Eq. 4. If the divergence is NaN or the product is not
  finite, the coefficient stays as it is.

  Args:
    coefficient: the coefficient of this step.
    kl: the divergence from the reference in this step, nats per trajectory.
    num_trajectories: the number of trajectories of this step.
    target: the wanted divergence, nats per trajectory.
    horizon: the time constant of the controller, in trajectories.
  """
  # NaN passes through max and min here, because NaN is their first argument. So
  # one check of the result finds both a NaN and an overflow.
  error = min(max(kl / target - 1, -0.2), 0.2)
  new = coefficient * (1 + error * num_trajectories / horizon)
  return new if math.isfinite(new) else coefficient


CONTROLLERS = {
  'fixed': lambda coefficient, kl, **_: coefficient,
  'adaptive': adaptive_coefficient,
}


@options.dataclass
class Kl(options.Options):
  """Options of the penalty on the KL divergence from the reference."""

  where: str = options.one_of(KL_PLACES)
  estimator: str = options.one_of(KL_ESTIMATORS)
  coefficient: float = options.number()
  controller: str = options.one_of(CONTROLLERS)
  target: float = options.number(above=0.0)
  horizon: float = options.number(above=0.0)
