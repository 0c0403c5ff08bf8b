"""Measures how much sampler and trainer differ on the same tokens.

B trajectories, L tokens. With k = pi_old (trainer) / mu (sampler) of a token,
before `rl.mismatch` truncates it:

  mismatch/logprob_abs_diff             max |log k|
  mismatch/logprob_abs_diff_{mean,p99}  mean and 99th percentile of |log k|
  mismatch/k3                           mean of k - 1 - log k: KL(mu || pi_old)
  mismatch/weight_raw_{mean,max}        mean and maximum of k
  mismatch/sequence_log_weight_raw_max  max over rows of |sum log k|
  mismatch/ess                          (sum k)^2 / (n sum k^2)

The product of k over a long row overflows in every dtype, so its log is
measured. Where k itself would overflow (log k > 60, a token that the sampler
could not have drawn), k, k3 and ess are computed with log k = 60, which still
shows a reader that something is wrong.
"""

import chex
import jax
import jax.numpy as jnp

from stppo_jax.rl import masking

Array = jax.Array

# e^60 is 1e26: a sum over 1e12 such tokens is finite in float32.
LOG_WEIGHT_LIMIT = 60.0


def measure(
  old_logprobs_BL: Array, sampler_logprobs_BL: Array, loss_mask_BL: Array
) -> dict[str, Array]:
  """Returns the metrics that the module's docstring lists, as scalars.

  All are 0 if the loss mask is false everywhere.

  Args:
    old_logprobs_BL: log pi_old of the tokens, by the trainer.
    sampler_logprobs_BL: log mu of the tokens, as the sampler reported them.
    loss_mask_BL: bool, the tokens that are measured.
  """
  chex.assert_equal_shape([old_logprobs_BL, sampler_logprobs_BL, loss_mask_BL])
  log_k_BL = masking.select(old_logprobs_BL - sampler_logprobs_BL, loss_mask_BL)
  bounded_BL = jnp.minimum(log_k_BL, LOG_WEIGHT_LIMIT)
  k_BL = masking.select(jnp.exp(bounded_BL), loss_mask_BL)
  # k / max k has the same effective sample size, and its squares neither
  # overflow nor all vanish.
  top = jnp.max(bounded_BL, where=loss_mask_BL, initial=-jnp.inf)
  share_BL = masking.select(jnp.exp(bounded_BL - top), loss_mask_BL)
  mean_share = masking.masked_mean(share_BL, loss_mask_BL)
  return {
    'mismatch/logprob_abs_diff': jnp.max(jnp.abs(log_k_BL)),
    'mismatch/logprob_abs_diff_mean': masking.masked_mean(
      jnp.abs(log_k_BL), loss_mask_BL
    ),
    'mismatch/logprob_abs_diff_p99': _percentile_99(
      jnp.abs(log_k_BL), loss_mask_BL
    ),
    'mismatch/k3': masking.masked_mean(
      jnp.expm1(bounded_BL) - bounded_BL, loss_mask_BL
    ),
    'mismatch/weight_raw_mean': masking.masked_mean(k_BL, loss_mask_BL),
    'mismatch/weight_raw_max': jnp.max(k_BL),
    'mismatch/sequence_log_weight_raw_max': jnp.max(
      jnp.abs(jnp.sum(log_k_BL, axis=1))
    ),
    'mismatch/ess': masking.divide(
      jnp.square(mean_share),
      masking.masked_mean(jnp.square(share_BL), loss_mask_BL),
    ),
  }


def _percentile_99(x_BL: Array, mask_BL: Array) -> Array:
  """Returns the smallest x that 99% of x do not exceed; 0 for an empty mask."""
  # inf is sorted to the end, behind the numbers that the mask selects.
  ordered = jnp.sort(jnp.where(mask_BL, x_BL, jnp.inf), axis=None)
  count = jnp.sum(mask_BL)
  index = count - count // 100 - 1
  return jnp.where(count > 0, ordered[jnp.maximum(index, 0)], 0.0)
