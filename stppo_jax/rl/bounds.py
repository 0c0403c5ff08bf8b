"""Trusted intervals of the ratio.

B trajectories, L tokens. A rule is called `rule(evidence, statistics,
**options)` and returns the absolute bounds (low, high): scalars, or arrays
[B, L]. `statistics` is what the rule's entry in `BOUNDS_STATISTICS` made of the
whole minibatch, () for a rule that needs none. Nothing here is learned from:
the caller detaches the bounds.
"""

import typing

import jax
import jax.numpy as jnp

from stppo_jax.rl import aggregation
from stppo_jax.rl import loss_context as loss_context_lib
from stppo_jax.rl import masking

Array = jax.Array
Number = Array | float
Evidence = loss_context_lib.LossContext


def fixed(
  evidence: Evidence, statistics: tuple[()], *, clip_low, clip_high
) -> tuple[Number, Number]:
  """[1 - clip_low, 1 + clip_high], both positive distances from 1."""
  del evidence, statistics
  return 1 - clip_low, 1 + clip_high


def entropy_scaled(
  evidence: Evidence,
  mean_entropy: Array,
  *,
  clip_low: Number,
  clip_high: Number,
  least: Number,
  most: Number,
) -> tuple[Array, Array]:
  """SSPO: distances scaled by the entropy of the ratio's segment.

    f = clip(H / mean H, least, most)
    [1 - f clip_low, 1 + f clip_high]

  H is the mean entropy of the segment's tokens, mean H that of the segments.

  The paper's function f is unknown; this one is our choice.
  """
  H_BL = evidence.mean(evidence.entropy_BL, evidence.level)
  some = mean_entropy > 0
  relative_BL = jnp.where(some, H_BL / jnp.where(some, mean_entropy, 1), 1)
  f_BL = jnp.clip(relative_BL, least, most)
  return 1 - f_BL * clip_low, 1 + f_BL * clip_high


def _mean_entropy(evidence, **options):
  """The mean over segments of their mean entropy."""
  del options
  weights_BL, count = aggregation.segment_weights(
    evidence.level,
    evidence.batch,
    evidence.entropy_BL.dtype,
    num_turns=evidence.num_turns,
    implementation=evidence.implementation,
  )
  return masking.divide(jnp.sum(weights_BL * evidence.entropy_BL), count)


MAX_STEPS = 10_000  # that the bounds of `balanced` may take to their limits


class _Interval(typing.NamedTuple):
  """Of bounds, or of steps that bounds have taken."""

  low: Array
  high: Array


def balanced(
  evidence: Evidence, statistics: _Interval, **options
) -> tuple[Array, Array]:
  """BAPO: the interval that `_balance` found for the minibatch."""
  del evidence, options
  return statistics


def _balance(
  evidence,
  *,
  low,
  high,
  low_step,
  high_step,
  low_limit,
  high_limit,
  positive_share,
):
  """Widens or lifts the interval until positive terms weigh enough.

  The share of the positive advantages in the clipped objective, of which the
  absolute value under the sum is our reading (arXiv 2510.18927):

    sum_{A > 0} pi_old min(r A, clip(r) A) / sum pi_old |min(r A, clip(r) A)|

  While it is below `positive_share`: high grows by its step up to its limit,
  and after that low does.
  """
  ratio_BL = evidence.ratio_at(evidence.level)
  advantages_BL, mask_BL = evidence.advantages_BL, evidence.mask_BL
  old_BL = masking.select(evidence.batch.old_logprobs_BL, mask_BL)
  weight_BL = masking.select(jnp.exp(old_BL), mask_BL)

  dtype = ratio_BL.dtype
  # Counted in steps: sums of steps would round, and a step below the rounding
  # would never arrive.
  most = _Interval(
    _steps(low, low_limit, low_step), _steps(high, high_limit, high_step)
  )

  def interval_at(steps):
    return _Interval(
      jnp.minimum(low + steps.low * low_step, low_limit).astype(dtype),
      jnp.minimum(high + steps.high * high_step, high_limit).astype(dtype),
    )

  def wanting(steps):
    interval = interval_at(steps)
    clipped_BL = jnp.clip(ratio_BL, interval.low, interval.high)
    term_BL = weight_BL * jnp.minimum(
      ratio_BL * advantages_BL, clipped_BL * advantages_BL
    )
    positive = jnp.sum(jnp.maximum(term_BL, 0))
    everything = jnp.sum(jnp.abs(term_BL))
    room = (steps.high < most.high) | (steps.low < most.low)
    return (positive < positive_share * everything) & room

  def widen(steps):
    widens = (steps.high < most.high).astype(jnp.int32)
    return _Interval(steps.low + 1 - widens, steps.high + widens)

  zero = jnp.zeros((), jnp.int32)
  return interval_at(jax.lax.while_loop(wanting, widen, _Interval(zero, zero)))


def _steps(start, limit, step):
  """How many steps lead from the start to the limit."""
  count = jnp.ceil((limit - start) / step)
  return jnp.clip(count, 0, MAX_STEPS).astype(jnp.int32)


def _nothing(evidence, **options):
  del evidence, options
  return ()


BOUNDS = {
  'fixed': fixed,
  'entropy_scaled': entropy_scaled,
  'balanced': balanced,
}
BOUNDS_STATISTICS = {
  'fixed': _nothing,
  'entropy_scaled': _mean_entropy,
  'balanced': _balance,
}
USES_STATISTICS = frozenset({'entropy_scaled', 'balanced'})
