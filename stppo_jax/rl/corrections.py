"""Corrections, which weigh the terms of the loss, and their table.

B trajectories, L tokens. A correction is called
`correction(context, low, high, statistics, **options)`, where low and high are
the bounds of the ratio, and returns `loss_context.TermWeights`. `statistics` is
the result of its `Choice.statistics` for the whole minibatch, or () for a
correction without statistics. The weights of all selected corrections are
multiplied. The count that divides the sum of the terms does not depend on the
weights, so a term of weight 0 still counts.

`clipping_bias` has a module of its own. The other corrections serve samplers
whose probabilities, mu, differ from pi_old, the trainer's probabilities under
the old policy. mu and pi_old differ even with the same weights if the sampler
has other kernels, another precision or another engine. A token has

  k = pi_old (trainer) / mu (sampler)

The k of a turn or a sequence is the geometric mean or the product of the k of
its policy tokens. log k is clipped to [-20, 20]. The weights of the policy
terms are

  tis     min(k, cap)                          truncated (Yao et al., 2025)
  mis     k where k <= cap, else 0             masked (Liu et al., 2025)
  icepop  k where least <= k <= most, else 0   masked (arXiv 2510.18855)
  geo_rs  1 where |log k| <= band, else 0      rejected (documentation of verl)

If the mean of the log-ratios is not 0, a product over hundreds of tokens is
near 0 or above every cap. The geometric mean stays near 1.

`mis`, `icepop` and `geo_rs` are functions of log k. `_of_k` makes corrections
from these functions.

The weights are detached. `diagnostics.mismatch` measures k before it is clipped
or truncated.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from stppo_jax.rl import clipping_bias
from stppo_jax.rl import loss_context as loss_context_lib
from stppo_jax.rl import options
from stppo_jax.rl import ratios

Array = jax.Array
Number = Array | float
LossContext = loss_context_lib.LossContext
TermWeights = loss_context_lib.TermWeights
sg = jax.lax.stop_gradient

LEVELS = ('token', 'turn', 'sequence')
_ARRAYS = frozenset({'sampler_logprobs_BL'})


def _one(context):
  return jnp.ones_like(context.advantages_BL)


def _ratio(context):
  return sg(context.ratio_BL)  # detached, because weights have no gradient


# Maps the option `truncated` to a factor. `tis` truncates the product of k and
# the factor, and then divides the truncated product by the factor. With
# 'product' the factor is the ratio r, so `tis` truncates k r = pi_theta / mu,
# which is staleness and mismatch together, as in MiniRL (arXiv 2512.01374). The
# objective multiplies by r again.
TRUNCATED: Mapping[str, Callable[[LossContext], Array]] = {
  'mismatch': _one,
  'product': _ratio,
}


@options.dataclass
class Mismatch(options.Options):
  """Options of k, the ratio of the trainer's to the sampler's probability.

  Attributes:
    level: the tokens that share a k, one of `LEVELS`.
    reduce: how the shared k is formed from the tokens' k, 'mean' (geometric
      mean) or 'sum' (product, a sum of logarithms).
  """

  level: str = options.one_of(LEVELS)
  reduce: str = options.one_of(ratios.REDUCES)


@options.dataclass
class Tis(Mismatch):
  """Options of `tis`.

  Attributes:
    cap: the largest value of k or, with truncated='product', of the product of
      k and the ratio; larger values are truncated to the cap.
    truncated: a key of `TRUNCATED`.
  """

  cap: float = options.number(above=0.0)
  truncated: str = options.one_of(TRUNCATED)


def tis(
  context: LossContext,
  low: Number,
  high: Number,
  statistics: tuple[()],
  *,
  cap: Number,
  level: str,
  reduce: str,
  truncated: str,
) -> TermWeights:
  """Returns min(k, cap), or with truncated='product' min(k r, cap) / r.

  r is the ratio at the level of the algorithm.
  """
  del low, high, statistics
  factor_BL = TRUNCATED[truncated](context)
  k_BL = jnp.exp(context.log_mismatch(level, reduce))
  return loss_context_lib.policy_weights(
    jnp.minimum(k_BL * factor_BL, cap) / factor_BL
  )


@options.dataclass
class Mis(Mismatch):
  """Options of `mis`.

  Attributes:
    cap: terms with a larger k get weight 0.
  """

  cap: float = options.number(above=0.0)


def mis(log_k_BL: Array, *, cap: Number) -> Array:
  """Returns the weights of policy terms: k where k <= cap, else 0."""
  k_BL = jnp.exp(log_k_BL)
  return jnp.where(k_BL <= cap, k_BL, 0)


@options.dataclass
class Icepop(Mismatch):
  """Options of `icepop`; terms with k outside [least, most] get weight 0."""

  least: float = options.number(at_most=1.0)
  most: float = options.number()

  @staticmethod
  def conflicts(most, **_):
    if most < 1:
      yield 'most', most, '1 or greater'


def icepop(log_k_BL: Array, *, least: Number, most: Number) -> Array:
  """Returns the weights of policy terms: k if least <= k <= most, else 0."""
  k_BL = jnp.exp(log_k_BL)
  inside_BL = (k_BL >= least) & (k_BL <= most)
  return jnp.where(inside_BL, k_BL, 0)


@options.dataclass
class GeoRs(Mismatch):
  """Options of `geo_rs`; terms with |log k| above the band get weight 0."""

  band: float = options.number()


def geo_rs(log_k_BL: Array, *, band: Number) -> Array:
  """Returns the weights of policy terms: 0 where |log k| > band, else 1."""
  return (jnp.abs(log_k_BL) <= band).astype(log_k_BL.dtype)


def _of_k(weight: Callable[..., Array], options_of_k: type[Mismatch]):
  """Returns the table entry of a correction that depends on log k alone.

  Args:
    weight: function that returns the weights. Its arguments are log k and the
      limits of the correction, such as `cap`.
    options_of_k: the dataclass of the correction's options.
  """

  def correction(context, low, high, statistics, *, level, reduce, **limits):
    del low, high, statistics
    log_k_BL = context.log_mismatch(level, reduce)
    return loss_context_lib.policy_weights(weight(log_k_BL, **limits))

  return options.Choice(correction, options_of_k, arrays=_ARRAYS)


CORRECTIONS = {
  'clipping_bias': options.Choice(
    clipping_bias.clipping_bias,
    clipping_bias.ClippingBias,
    clipping_bias.minibatch_sums,
    clipping_bias.needs_minibatch_sums,
    metrics=('stab/norm_clipped', 'stab/norm_unclipped', 'stab/rho'),
  ),
  'tis': options.Choice(tis, Tis, arrays=_ARRAYS),
  'mis': _of_k(mis, Mis),
  'icepop': _of_k(icepop, Icepop),
  'geo_rs': _of_k(geo_rs, GeoRs),
}

# A dataclass with the names of the selected corrections and the options of all
# corrections.
Correction = options.selection('Correction', CORRECTIONS)
