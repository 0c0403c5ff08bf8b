"""Corrections for a sampler whose probabilities differ from the trainer's.

B trajectories, L tokens. Under the same weights, other kernels, another
precision or another engine give another mu than the trainer's pi_old. With

  k = pi_old (trainer) / mu (sampler)

of a token, or of a sequence (the product over its policy tokens; log k is
clipped to [-20, 20] in both cases):

  tis     min(k, cap)                                 truncated
  mis     k where k <= cap, else 0                    masked
  icepop  k where least <= k <= most, else 0          (arXiv 2510.18855)
  geo_rs  1 where |mean log k of the sequence| <= band, else 0: rejected

k is detached and multiplies the policy terms. `mismatch_metrics` measures k
before any of this.
"""

from collections.abc import Callable
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from stppo_jax.rl import loss_context as loss_context_lib
from stppo_jax.rl import options as options_lib

Array = jax.Array
Number = Array | float
LossContext = loss_context_lib.LossContext
TermWeights = loss_context_lib.TermWeights
sg = jax.lax.stop_gradient

LEVELS = ('token', 'sequence')


def _one(context):
  return jnp.ones_like(context.advantages_BL)


def _ratio(context):
  return sg(context.ratio_at(context.level))  # Detached: a factor of a weight.


# The factor of k in what `tis` truncates; the objective multiplies by the same
# factor itself. 'product' truncates pi_theta / mu, staleness and mismatch
# together, as in MiniRL.
TRUNCATED: Mapping[str, Callable[[LossContext], Array]] = {
  'mismatch': _one,
  'product': _ratio,
}


@options_lib.dataclass
class Tis(options_lib.Options):
  """Options of `tis`."""

  cap: float = options_lib.number(above=0.0)
  level: str = options_lib.one_of(LEVELS)
  truncated: str = options_lib.one_of(TRUNCATED)


def tis(
  context: LossContext,
  low: Number,
  high: Number,
  statistics: tuple[()],
  *,
  cap: Number,
  level: str,
  truncated: str,
) -> TermWeights:
  """Returns min(k, cap); with truncated='product' min(k r, cap) / r."""
  del low, high, statistics
  factor_BL = TRUNCATED[truncated](context)
  k_BL = jnp.exp(context.log_mismatch(level))
  return loss_context_lib.policy_weights(
    jnp.minimum(k_BL * factor_BL, cap) / factor_BL
  )


@options_lib.dataclass
class Mis(options_lib.Options):
  """Options of `mis`."""

  cap: float = options_lib.number(above=0.0)
  level: str = options_lib.one_of(LEVELS)


def mis(
  context: LossContext,
  low: Number,
  high: Number,
  statistics: tuple[()],
  *,
  cap: Number,
  level: str,
) -> TermWeights:
  """Returns k where k <= cap, else 0."""
  del low, high, statistics
  k_BL = jnp.exp(context.log_mismatch(level))
  return loss_context_lib.policy_weights(jnp.where(k_BL <= cap, k_BL, 0))


@options_lib.dataclass
class Icepop(options_lib.Options):
  """Options of `icepop`."""

  least: float = options_lib.number(at_most=1.0)
  most: float = options_lib.number()

  @staticmethod
  def conflicts(most, **_):
    if most < 1:
      yield 'most', most, '1 or greater'


def icepop(
  context: LossContext,
  low: Number,
  high: Number,
  statistics: tuple[()],
  *,
  least: Number,
  most: Number,
) -> TermWeights:
  """Returns k of the token where least <= k <= most, else 0."""
  del low, high, statistics
  k_BL = jnp.exp(context.log_mismatch('token'))
  inside_BL = (k_BL >= least) & (k_BL <= most)
  return loss_context_lib.policy_weights(jnp.where(inside_BL, k_BL, 0))


@options_lib.dataclass
class GeoRs(options_lib.Options):
  """Options of `geo_rs`."""

  band: float = options_lib.number()


def geo_rs(
  context: LossContext,
  low: Number,
  high: Number,
  statistics: tuple[()],
  *,
  band: Number,
) -> TermWeights:
  """Returns 0 for sequences whose mean log k is further than `band` from 0."""
  del low, high, statistics
  log_k_BL = context.log_mismatch('token')
  mean_BL = context.mean(log_k_BL, 'sequence')
  near_BL = jnp.abs(mean_BL) <= band
  return loss_context_lib.policy_weights(near_BL.astype(log_k_BL.dtype))


CORRECTIONS = {  # all of them read the sampler's log-probabilities
  'tis': options_lib.Choice(tis, Tis),
  'mis': options_lib.Choice(mis, Mis),
  'icepop': options_lib.Choice(icepop, Icepop),
  'geo_rs': options_lib.Choice(geo_rs, GeoRs),
}
