"""Trusted intervals of the ratio.

B trajectories, L tokens. A bounds rule is called `rule(context, statistics,
**options)` and returns the absolute bounds (low, high): scalars, or arrays
[B, L]. `statistics` is the result of the rule's `Choice.statistics` for the
whole minibatch, or () for a rule without statistics. The caller detaches the
bounds, so that no gradient flows through them.
"""

import jax
import jax.numpy as jnp

from stppo_jax.rl import aggregation
from stppo_jax.rl import balanced_bounds
from stppo_jax.rl import loss_context as loss_context_lib
from stppo_jax.rl import masking
from stppo_jax.rl import options as options_lib
from stppo_jax.rl import ratios

Array = jax.Array
Number = Array | float
LossContext = loss_context_lib.LossContext


@options_lib.dataclass
class Fixed(options_lib.Named):
  """Options of `fixed`."""

  clip_low: float = options_lib.number()
  clip_high: float = options_lib.number()


def fixed(
  context: LossContext,
  statistics: tuple[()],
  *,
  clip_low: Number,
  clip_high: Number,
) -> tuple[Number, Number]:
  """Returns (1 - clip_low, 1 + clip_high).

  Sources: PPO, arXiv 1707.06347, with equal distances; DAPO, arXiv 2503.14476,
  with unequal distances.
  """
  del context, statistics
  return 1 - clip_low, 1 + clip_high


@options_lib.dataclass
class ByLength(Fixed):
  """Options of `by_length`; with exponent 0 the bounds are as in `fixed`."""

  exponent: float = options_lib.number(at_most=1.0)


def by_length(
  context: LossContext,
  statistics: tuple[()],
  *,
  clip_low: Number,
  clip_high: Number,
  exponent: Number,
) -> tuple[Array, Array]:
  """Returns (1 - clip_low n^-a, 1 + clip_high n^-a).

  n is the number of policy tokens of the ratio's segment, and a is the option
  `exponent`. The mean of n independent log-ratios has a standard deviation
  proportional to n^(-1/2); see docs/turn_bounds.md. This rule is our choice.
  """
  del statistics
  # `share_BL` is 1 / n on the mask. Off the mask the scale is 1.
  share_BL, _ = aggregation.segment_weights(
    context.level,
    context.batch,
    context.advantages_BL.dtype,
    num_turns=context.num_turns,
  )
  scale_BL = jnp.where(context.mask_BL, share_BL, 1) ** exponent
  return 1 - clip_low * scale_BL, 1 + clip_high * scale_BL


@options_lib.dataclass
class ByReward(Fixed):
  """Options of `by_reward`, whose factor f is within `strength` of 1."""

  strength: float = options_lib.number(at_most=1.0)


def by_reward(
  context: LossContext,
  statistics: tuple[()],
  *,
  clip_low: Number,
  clip_high: Number,
  strength: Number,
) -> tuple[Array, Array]:
  """Returns bounds that are wider where a turn earned more: A2TGPO.

    low, high = 1 - f clip_low, 1 + f clip_high
    f         = 1 + strength (2 sigmoid(z) - 1)

  z is `turn_z_BL` of the batch. In the last turn of a row z is 0. In an earlier
  turn k, z is the reward of the turn, normalised over the turns k of those rows
  of the question in which turn k is not the last turn. Source: arXiv
  2605.06200, with strength 0.3.
  """
  del statistics
  z_BL = masking.select(context.batch.turn_z_BL, context.mask_BL)
  f_BL = 1 + strength * jnp.tanh(z_BL / 2)  # tanh(z / 2) = 2 sigmoid(z) - 1
  return 1 - f_BL * clip_low, 1 + f_BL * clip_high


@options_lib.dataclass
class TotalVariation(options_lib.Named):
  """Options of `total_variation`: the largest fall and rise of pi."""

  fall: float = options_lib.number(at_most=1.0)
  rise: float = options_lib.number(at_most=1.0)


def total_variation(
  context: LossContext,
  statistics: tuple[()],
  *,
  fall: Number,
  rise: Number,
) -> tuple[Array, Array]:
  """Returns bounds that limit how far each probability moves: DPPO.

    low, high = 1 - fall / pi_old, 1 + rise / pi_old

  A ratio is trusted if pi_old - fall <= pi <= pi_old + rise. |pi - pi_old| is
  the total variation distance between two distributions over two outcomes,
  "this token" and "any other token". Source: arXiv 2602.04879, Binary-TV.
  """
  del statistics
  inverse_BL = jnp.exp(-_old_logprobs(context))
  return 1 - fall * inverse_BL, 1 + rise * inverse_BL


@options_lib.dataclass
class BinaryKl(options_lib.Named):
  """Options of `binary_kl`: the largest KL if pi falls, and if pi rises."""

  fall: float = options_lib.number()
  rise: float = options_lib.number()


# After so many halvings, an interval of 20 nats has a length of 7e-14 nats.
_HALVINGS = 48
_PROBABILITY_EPSILON = 1e-8  # as in the public implementation of DPPO


def binary_kl(
  context: LossContext,
  statistics: tuple[()],
  *,
  fall: Number,
  rise: Number,
) -> tuple[Array, Array]:
  """Returns bounds that limit the divergence of each token: DPPO.

    KL = pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))

  A ratio is trusted if pi < pi_old and KL <= fall, or if pi > pi_old and
  KL <= rise. The bounds are found by halving intervals of log(pi / pi_old), on
  which KL is monotone. Source: arXiv 2602.04879, Binary-KL.
  """
  del statistics
  old_BL = _old_logprobs(context)

  # The search varies the log-ratio and not log pi, because the results are
  # bounds of the ratio. The epsilon keeps the logarithms finite where a
  # probability is 1.
  def divergence(log_ratio_BL):
    rest_BL = 1 - jnp.exp(old_BL)
    left_BL = 1 - jnp.exp(old_BL + log_ratio_BL)
    gone_BL = jnp.log(rest_BL + _PROBABILITY_EPSILON) - jnp.log(
      left_BL + _PROBABILITY_EPSILON
    )
    return rest_BL * gone_BL - jnp.exp(old_BL) * log_ratio_BL

  def furthest(limit, end_BL):
    """Returns the log-ratio furthest from 0 whose KL is within a limit.

    The search goes from 0 to `end_BL` and no further.
    """

    # At `near` the divergence is always within the limit; at `far` it may
    # exceed the limit. The answer is `near` after the last halving, or the end
    # itself if the divergence at the end is within the limit.
    def halve(_, interval):
      near_BL, far_BL = interval
      middle_BL = (near_BL + far_BL) / 2
      inside_BL = divergence(middle_BL) <= limit
      return (
        jnp.where(inside_BL, middle_BL, near_BL),
        jnp.where(inside_BL, far_BL, middle_BL),
      )

    start = jnp.zeros_like(end_BL), end_BL
    near_BL, _ = jax.lax.fori_loop(0, _HALVINGS, halve, start)
    return jnp.where(divergence(end_BL) <= limit, end_BL, near_BL)

  least = jnp.full_like(old_BL, -ratios.LOG_RATIO_LIMIT)
  low_BL = furthest(fall, least)
  # pi is at most 1, so the log-ratio is at most -log pi_old.
  high_BL = furthest(rise, ratios.limit(-old_BL))
  return jnp.exp(low_BL), jnp.exp(high_BL)


def _old_logprobs(context: LossContext) -> Array:
  """Returns log pi_old of each token, clipped to [-20, 0], 0 off the mask."""
  old_BL = context.batch.old_logprobs_BL
  assert old_BL is not None
  old_BL = masking.select(old_BL, context.mask_BL)
  return jnp.clip(old_BL, -ratios.LOG_RATIO_LIMIT, 0)


@options_lib.dataclass
class EntropyScaled(Fixed):
  """Options of `entropy_scaled`; the factor f lies in [least, most]."""

  least: float = options_lib.number()
  most: float = options_lib.number()

  @staticmethod
  def conflicts(least, most, **_):
    if most < least:
      yield 'most', most, f'{least} (least) or greater'


def entropy_scaled(
  context: LossContext,
  mean_entropy: Array,
  *,
  clip_low: Number,
  clip_high: Number,
  least: Number,
  most: Number,
) -> tuple[Array, Array]:
  """Returns bounds whose distances from 1 grow with a segment's entropy: SSPO.

    f = clip(H / mean H, least, most)
    low, high = 1 - f clip_low, 1 + f clip_high

  H is the mean entropy, in nats, of the tokens of the ratio's segment. mean H,
  the argument `mean_entropy`, is the mean of H over the segments of the
  minibatch. If mean H is 0, f is 1. Source: arXiv 2511.04256. The paper scales
  the bounds by entropy; the formula of f is our choice.
  """
  H_BL = context.mean(context.entropy_BL, context.level)
  some = mean_entropy > 0
  relative_BL = jnp.where(some, H_BL / jnp.where(some, mean_entropy, 1), 1)
  f_BL = jnp.clip(relative_BL, least, most)
  return 1 - f_BL * clip_low, 1 + f_BL * clip_high


def _mean_entropy(context: LossContext, **options) -> Array:
  """Returns the mean of all segments' mean entropies, in nats."""
  del options
  weights_BL, count = aggregation.segment_weights(
    context.level,
    context.batch,
    context.entropy_BL.dtype,
    num_turns=context.num_turns,
  )
  return masking.divide(jnp.sum(weights_BL * context.entropy_BL), count)


BOUNDS = {
  'fixed': options_lib.Choice(fixed, Fixed),
  'by_length': options_lib.Choice(by_length, ByLength),
  'by_reward': options_lib.Choice(
    by_reward, ByReward, arrays=frozenset({'turn_z_BL'})
  ),
  'total_variation': options_lib.Choice(total_variation, TotalVariation),
  'binary_kl': options_lib.Choice(binary_kl, BinaryKl),
  'entropy_scaled': options_lib.Choice(
    entropy_scaled,
    EntropyScaled,
    _mean_entropy,
    arrays=frozenset({'entropy_BL'}),
  ),
  'balanced': options_lib.Choice(
    balanced_bounds.balanced,
    balanced_bounds.Balanced,
    balanced_bounds.balance,
  ),
}
