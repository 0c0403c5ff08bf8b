"""Objectives: a token's term of the loss, inside and outside the bounds.

B trajectories, L tokens. An objective is called `objective(context, low, high,
statistics, **options)`, where low and high are the bounds of the ratio.
`statistics` is the result of its `Choice.statistics` for the whole minibatch,
or () for an objective without statistics. An objective returns (term_BL,
cut_BL): the term to be minimised, and a mask of the tokens whose gradient is
cut.

In `detached`, `masked`, `unclipped`, `tapered` and `gamma_weighted` the ratio
is a detached weight, and the gradient flows through log pi of the token itself.
So the option `ratio.gradient`, which says where the gradient of the ratio goes,
has no effect on these objectives. In `geometric` the gradient always goes
through the whole segment.
"""

import jax
import jax.numpy as jnp

from stppo_jax.rl import covariance as covariance_lib
from stppo_jax.rl import loss_context as loss_context_lib
from stppo_jax.rl import masking
from stppo_jax.rl import options as options_lib

Array = jax.Array
Number = Array | float
LossContext = loss_context_lib.LossContext
sg = jax.lax.stop_gradient


def pessimistic(
  context: LossContext, low: Number, high: Number, statistics: tuple[()]
) -> tuple[Array, Array]:
  """Returns max(-A r, -A clip(r, low, high)), the objective of PPO.

  A token is cut where r is above high with A > 0, or below low with A < 0.
  Source: arXiv 1707.06347 Eq. 7.
  """
  del statistics
  advantages_BL = context.advantages_BL
  trusted_BL, cut_BL = _trusted(context.ratio_BL, advantages_BL, low, high)
  return -advantages_BL * trusted_BL, cut_BL


@options_lib.dataclass
class DualClip(options_lib.Named):
  """Options of `dual_clip`; c: the ratio's upper limit where A < 0."""

  c: float = options_lib.number(above=1.0)


def dual_clip(
  context: LossContext,
  low: Number,
  high: Number,
  statistics: tuple[()],
  *,
  c: Number,
) -> tuple[Array, Array]:
  """Returns the pessimistic term, at most -c A where A < 0.

  A token is cut as in `pessimistic`, and where r is above c with A < 0.
  Source: arXiv 1912.09729 Eq. 5.
  """
  term_BL, cut_BL = pessimistic(context, low, high, statistics)
  advantages_BL = context.advantages_BL
  far_BL = (advantages_BL < 0) & (context.ratio_BL > c)
  return jnp.where(far_BL, -advantages_BL * c, term_BL), cut_BL | far_BL


def geometric(
  context: LossContext, low: Number, high: Number, statistics: tuple[()]
) -> tuple[Array, Array]:
  """Returns -A times the geometric mean of the clipped token ratios: GMPO.

  The bounds limit the ratio of each token, which is clipped as in `pessimistic`
  before the mean over the segment is formed. Source: arXiv 2507.20673.
  """
  del statistics
  advantages_BL = context.advantages_BL
  trusted_BL, cut_BL = _trusted(
    context.ratio_at('token'), advantages_BL, low, high
  )
  # The mean is formed of logarithms, because the product of many ratios would
  # overflow.
  mean_BL = context.mean(jnp.log(trusted_BL), context.level)
  return -advantages_BL * jnp.exp(mean_BL), cut_BL


@options_lib.dataclass
class SoftGate(options_lib.Named):
  """Options of `soft_gate`: tau where A > 0, and where A <= 0."""

  tau_positive: float = options_lib.number(above=0.0)
  tau_negative: float = options_lib.number(above=0.0)


def soft_gate(
  context: LossContext,
  low: Number,
  high: Number,
  statistics: tuple[()],
  *,
  tau_positive: Number,
  tau_negative: Number,
) -> tuple[Array, Array]:
  """Returns -A sigmoid(tau (r - 1)) 4 / tau, a soft form of clipping: SAPO.

  At r = 1 the gradient equals the gradient of -A r, and it decays on both sides
  of 1. The bounds are not used. Source: arXiv 2511.20347.
  """
  del low, high, statistics
  advantages_BL = context.advantages_BL
  tau_BL = jnp.where(advantages_BL > 0, tau_positive, tau_negative)
  gate_BL = jax.nn.sigmoid(tau_BL * (context.ratio_BL - 1)) * 4 / tau_BL
  return -advantages_BL * gate_BL, _none(context)


@options_lib.dataclass
class Quadratic(options_lib.Named):
  """Options of `quadratic`.

  The gradient is 0 where pi has moved by `threshold` in the direction of A.
  """

  threshold: float = options_lib.number(above=0.0)


def quadratic(
  context: LossContext,
  low: Number,
  high: Number,
  statistics: tuple[()],
  *,
  threshold: Number,
) -> tuple[Array, Array]:
  """Returns -A r + |A| pi_old (r - 1)^2 / (2 threshold): DRPO.

  The gradient is the gradient of -A r, times
  1 - sign(A) (pi - pi_old) / threshold. The bounds are not used. Source: arXiv
  2606.09821.
  """
  del low, high, statistics
  advantages_BL, ratio_BL = context.advantages_BL, context.ratio_BL
  old_BL = jnp.exp(
    masking.select(context.batch.old_logprobs_BL, context.mask_BL)
  )
  penalty_BL = jnp.abs(advantages_BL) * old_BL * jnp.square(ratio_BL - 1)
  term_BL = penalty_BL / (2 * threshold) - advantages_BL * ratio_BL
  return term_BL, _none(context)


def detached(
  context: LossContext, low: Number, high: Number, statistics: tuple[()]
) -> tuple[Array, Array]:
  """Returns -sg(clip(r, low, high)) A log pi, the objective of CISPO.

  The weight is clipped and no gradient is cut. Source: arXiv 2506.13585 Eq. 4.
  """
  del statistics
  weight_BL = jnp.clip(context.ratio_BL, low, high)
  return _weighted(weight_BL, context), _none(context)


@options_lib.dataclass
class Masked(options_lib.Named):
  """Options of `masked`; cap: the largest weight."""

  cap: float = options_lib.number(above=0.0, infinite=True)


def masked(
  context: LossContext,
  low: Number,
  high: Number,
  statistics: tuple[()],
  *,
  cap: Number,
) -> tuple[Array, Array]:
  """Returns -M sg(min(r, cap)) A log pi, the objective of MiniRL and DPPO.

  M is 0 where r is above high with A > 0, or below low with A < 0; else 1.
  Sources: arXiv 2512.01374; with a cap arXiv 2602.04879.
  """
  del statistics
  _, cut_BL = _trusted(context.ratio_BL, context.advantages_BL, low, high)
  weight_BL = jnp.where(cut_BL, 0, jnp.minimum(context.ratio_BL, cap))
  return _weighted(weight_BL, context), cut_BL


def unclipped(
  context: LossContext, low: Number, high: Number, statistics: tuple[()]
) -> tuple[Array, Array]:
  """Returns -sg(r) A log pi: the off-policy gradient, and no token is cut."""
  del low, high, statistics
  return _weighted(context.ratio_BL, context), _none(context)


def tapered(
  context: LossContext, low: Number, high: Number, statistics: tuple[()]
) -> tuple[Array, Array]:
  """Returns -sg(w) A log pi, with w = 1 where A > 0, else clip(r, low, high).

  Tokens with A > 0 have the full weight even if the policy has become unlikely
  to write them. Source: TOPR, arXiv 2503.14286, with the bounds 0 and 1.
  """
  del statistics
  truncated_BL = jnp.clip(context.ratio_BL, low, high)
  weight_BL = jnp.where(context.advantages_BL > 0, 1, truncated_BL)
  return _weighted(weight_BL, context), _none(context)


@options_lib.dataclass
class GammaWeighted(options_lib.Named):
  """Options of `gamma_weighted`: power k and decay lambda, by the sign of A."""

  power_positive: float = options_lib.number()
  decay_positive: float = options_lib.number(above=0.0)
  power_negative: float = options_lib.number()
  decay_negative: float = options_lib.number(above=0.0)


def gamma_weighted(
  context: LossContext,
  low: Number,
  high: Number,
  statistics: tuple[()],
  *,
  power_positive: Number,
  decay_positive: Number,
  power_negative: Number,
  decay_negative: Number,
) -> tuple[Array, Array]:
  """Returns -sg(phi(r)) A log pi, phi(r) = r^k exp(lambda (1 - r)): VESPO.

  phi(1) is 1, and phi decays towards 0 on both sides of its maximum, which is
  at k / lambda. The bounds are not used. Source: arXiv 2602.10693.
  """
  del low, high, statistics
  ratio_BL = context.ratio_BL
  some_BL = context.advantages_BL >= 0
  power_BL = jnp.where(some_BL, power_positive, power_negative)
  decay_BL = jnp.where(some_BL, decay_positive, decay_negative)
  # The weight is formed as a logarithm, because r^k can overflow.
  log_weight_BL = power_BL * jnp.log(ratio_BL) + decay_BL * (1 - ratio_BL)
  return _weighted(jnp.exp(log_weight_BL), context), _none(context)


def clip_cov(
  context: LossContext,
  low: Number,
  high: Number,
  covariance: covariance_lib.Covariance,
  *,
  share: Number,
  least: Number,
  most: Number,
) -> tuple[Array, Array]:
  """Returns the pessimistic term, 0 at a few tokens of high covariance.

  Random tokens whose (A - mean A) (log pi - mean log pi) lies between `least`
  and `most` are cut, because making likely tokens likelier lowers the entropy
  most. Source: arXiv 2505.22617.
  """
  del share
  term_BL, cut_BL = pessimistic(context, low, high, ())
  eligible_BL = _eligible(context, cut_BL, covariance, least, most)
  chosen_BL = eligible_BL & (
    covariance_lib.lots(context) >= covariance.threshold
  )
  return jnp.where(chosen_BL, 0, term_BL), cut_BL | chosen_BL


def _clip_cov_statistics(context, low, high, *, share, least, most):
  _, cut_BL = pessimistic(context, low, high, ())
  means = covariance_lib.means(context)
  eligible_BL = _eligible(context, cut_BL, means, least, most)
  return means.choosing(
    covariance_lib.lots(context), eligible_BL, context.mask_BL, share
  )


def _eligible(context, cut_BL, covariance, least, most):
  covariance_BL = covariance.of(context)
  between_BL = (covariance_BL > least) & (covariance_BL < most)
  return between_BL & ~cut_BL & context.mask_BL


def kl_cov(
  context: LossContext,
  low: Number,
  high: Number,
  covariance: covariance_lib.Covariance,
  *,
  share: Number,
  coefficient: Number,
) -> tuple[Array, Array]:
  """Returns -A r, with a penalty at the tokens of the highest covariance.

  The penalty is coefficient |log r|. No token is cut, and the bounds are not
  used. Source: arXiv 2505.22617.
  """
  del low, high, share
  chosen_BL = covariance.of(context) >= covariance.threshold
  penalty_BL = coefficient * jnp.abs(jnp.log(context.ratio_BL))
  term_BL = -context.advantages_BL * context.ratio_BL
  return term_BL + jnp.where(chosen_BL, penalty_BL, 0), _none(context)


def _kl_cov_statistics(context, low, high, *, share, coefficient):
  del low, high, coefficient
  means, mask_BL = covariance_lib.means(context), context.mask_BL
  return means.choosing(means.of(context), mask_BL, mask_BL, share)


@options_lib.dataclass
class PositiveExamples(options_lib.Named):
  """Options of `positive_examples`; least: the lowest imitated outcome."""

  coefficient: float = options_lib.number()
  least: float = options_lib.number()


def positive_examples(
  context: LossContext,
  low: Number,
  high: Number,
  weight: Array,
  *,
  coefficient: Number,
  least: Number,
) -> tuple[Array, Array]:
  """Returns the pessimistic term plus a term that imitates good rows: VAPO.

  Good rows have an outcome of `least` or more. Their policy tokens get the
  additional term -coefficient weight log pi. `weight` turns a mean over all
  policy tokens of the minibatch into a mean over the tokens of good rows.
  Corrections weigh both terms. Source: arXiv 2504.05118.
  """
  term_BL, cut_BL = pessimistic(context, low, high, ())
  correct_BL = _imitated(context, least)
  likelihood_BL = masking.select(context.logprobs_BL, correct_BL)
  return term_BL - coefficient * weight * likelihood_BL, cut_BL


def _positive_weight(context, low, high, *, coefficient, least):
  del low, high, coefficient
  count = lambda mask_BL: jnp.sum(mask_BL, dtype=context.logprobs_BL.dtype)
  correct_BL = _imitated(context, least)
  return masking.divide(count(context.mask_BL), count(correct_BL))


def _imitated(context, least):
  return masking.imitated(context.batch.rewards_BL, context.mask_BL, least)


def _trusted(ratio_BL, advantages_BL, low, high):
  """Returns the ratio, set to the bound at cut tokens, and their mask."""
  above_BL = (ratio_BL > high) & (advantages_BL > 0)
  below_BL = (ratio_BL < low) & (advantages_BL < 0)
  # These selections have the same value as max and clip. If the ratio lies
  # exactly on a bound, the selections keep the whole gradient, while max and
  # clip keep half of it.
  trusted_BL = jnp.where(above_BL, high, jnp.where(below_BL, low, ratio_BL))
  return trusted_BL, above_BL | below_BL


def _weighted(weight_BL, context):
  # The weight corrects for the old policy. No gradient flows through it.
  return -sg(weight_BL) * context.advantages_BL * context.logprobs_BL


def _none(context):
  return jnp.zeros(context.mask_BL.shape, bool)


OBJECTIVES = {
  'pessimistic': options_lib.Choice(pessimistic),
  'dual_clip': options_lib.Choice(dual_clip, DualClip),
  'geometric': options_lib.Choice(geometric),
  'soft_gate': options_lib.Choice(soft_gate, SoftGate),
  'quadratic': options_lib.Choice(quadratic, Quadratic),
  'detached': options_lib.Choice(detached),
  'masked': options_lib.Choice(masked, Masked),
  'unclipped': options_lib.Choice(unclipped),
  'tapered': options_lib.Choice(tapered),
  'gamma_weighted': options_lib.Choice(gamma_weighted, GammaWeighted),
  'clip_cov': options_lib.Choice(
    clip_cov, covariance_lib.ClipCov, _clip_cov_statistics
  ),
  'kl_cov': options_lib.Choice(
    kl_cov, covariance_lib.KlCov, _kl_cov_statistics
  ),
  'positive_examples': options_lib.Choice(
    positive_examples,
    PositiveExamples,
    _positive_weight,
    arrays=frozenset({'rewards_BL'}),
  ),
}
