"""Corrections for a sampler whose probabilities differ from the trainer's.

B trajectories, L tokens. Under the same weights, other kernels, another
precision or another engine give another mu than the trainer's pi_old. With

  k = pi_old (trainer) / mu (sampler)

of a token, or of a sequence (the product over its policy tokens; log k is
clipped to [-20, 20] in both cases):

  tis     min(k, cap)                                 truncated
  mis     k where k <= cap, else 0                    masked
  icepop  k where low <= k <= high, else 0            (arXiv 2510.18855)
  geo_rs  1 where |mean log k of the sequence| <= band, else 0: rejected

k is detached and multiplies the policy terms. The metric
`mismatch/weight_raw_max` is k before any of this.
"""

from collections.abc import Callable
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from stppo_jax.rl import loss_context as loss_context_lib

Array = jax.Array
Number = Array | float
Evidence = loss_context_lib.LossContext
Correction = loss_context_lib.Correction
sg = jax.lax.stop_gradient

NAMES = frozenset({'tis', 'mis', 'icepop', 'geo_rs'})
LEVELS = ('token', 'sequence')


def _one(evidence):
  return jnp.ones_like(evidence.advantages_BL)


def _ratio(evidence):
  return sg(evidence.ratio_at(evidence.level))  # part of a weight


# What `tis` truncates, divided by what the objective multiplies by itself.
# 'product' is pi_theta / mu: staleness and mismatch together, as in MiniRL.
TRUNCATED: Mapping[str, Callable[[Evidence], Array]] = {
  'mismatch': _one,
  'product': _ratio,
}


def tis(
  evidence: Evidence,
  low: Number,
  high: Number,
  statistics: tuple[()],
  *,
  cap: Number,
  level: str,
  truncated: str,
) -> Correction:
  """min(k, cap); with truncated='product' min(k r, cap) / r."""
  del low, high, statistics
  factor_BL = TRUNCATED[truncated](evidence)
  k_BL = jnp.exp(evidence.log_mismatch(level))
  return loss_context_lib.of_policy(
    jnp.minimum(k_BL * factor_BL, cap) / factor_BL
  )


def mis(
  evidence: Evidence,
  low: Number,
  high: Number,
  statistics: tuple[()],
  *,
  cap: Number,
  level: str,
) -> Correction:
  """k where k <= cap, else 0."""
  del low, high, statistics
  k_BL = jnp.exp(evidence.log_mismatch(level))
  return loss_context_lib.of_policy(jnp.where(k_BL <= cap, k_BL, 0))


def icepop(
  evidence: Evidence,
  low: Number,
  high: Number,
  statistics: tuple[()],
  *,
  least: Number,
  most: Number,
) -> Correction:
  """k of the token where least <= k <= most, else 0."""
  del low, high, statistics
  k_BL = jnp.exp(evidence.log_mismatch('token'))
  inside_BL = (k_BL >= least) & (k_BL <= most)
  return loss_context_lib.of_policy(jnp.where(inside_BL, k_BL, 0))


def geo_rs(
  evidence: Evidence,
  low: Number,
  high: Number,
  statistics: tuple[()],
  *,
  band: Number,
) -> Correction:
  """Rejects a sequence whose mean log k is further than `band` from 0."""
  del low, high, statistics
  log_k_BL = evidence.log_mismatch('token')
  mean_BL = evidence.mean(log_k_BL, 'sequence')
  near_BL = jnp.abs(mean_BL) <= band
  return loss_context_lib.of_policy(near_BL.astype(log_k_BL.dtype))
