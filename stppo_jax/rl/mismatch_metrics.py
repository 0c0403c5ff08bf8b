"""How far sampler and trainer are apart on the same tokens and weights.

B trajectories, L tokens. With k = pi_old (trainer) / mu (sampler) of a token,
before any truncation (what `rl.mismatch` does with it comes later):

  mismatch/logprob_abs_diff          max |log k|
  mismatch/k3                        mean of k - 1 - log k: KL(mu || pi_old)
  mismatch/weight_raw_{mean,max}     of k
  mismatch/sequence_weight_raw_max   of the product of a row's k
  mismatch/ess                       (sum k)^2 / (n sum k^2)
"""

import chex
import jax
import jax.numpy as jnp

from stppo_jax.rl import masking

Array = jax.Array


def measure(
  old_logprobs_BL: Array, sampler_logprobs_BL: Array, loss_mask_BL: Array
) -> dict[str, Array]:
  """The metrics of the module's docstring; all 0 without a token."""
  chex.assert_equal_shape([old_logprobs_BL, sampler_logprobs_BL, loss_mask_BL])
  log_k_BL = masking.select(old_logprobs_BL - sampler_logprobs_BL, loss_mask_BL)
  k_BL = masking.select(jnp.exp(log_k_BL), loss_mask_BL)
  k_B = jnp.exp(jnp.sum(log_k_BL, axis=1))
  mean = masking.masked_mean(k_BL, loss_mask_BL)
  return {
    'mismatch/logprob_abs_diff': jnp.max(jnp.abs(log_k_BL)),
    'mismatch/k3': masking.masked_mean(
      jnp.expm1(log_k_BL) - log_k_BL, loss_mask_BL
    ),
    'mismatch/weight_raw_mean': mean,
    'mismatch/weight_raw_max': jnp.max(k_BL),
    'mismatch/sequence_weight_raw_max': jnp.max(
      masking.select(k_B, jnp.any(loss_mask_BL, axis=1))
    ),
    'mismatch/ess': masking.divide(
      jnp.square(mean), masking.masked_mean(jnp.square(k_BL), loss_mask_BL)
    ),
  }
