"""Bounds of the ratio that balance positive and negative advantages: BAPO.

`bounds.BOUNDS` has the rule as 'balanced'. B trajectories, L tokens.
"""

import typing

import jax
import jax.numpy as jnp

from stppo_jax.rl import loss_context as loss_context_lib
from stppo_jax.rl import masking
from stppo_jax.rl import options as options_lib

Array = jax.Array
Number = Array | float
LossContext = loss_context_lib.LossContext


# The largest number of steps in which a bound may reach its limit. Every step
# costs a pass over the minibatch.
MAX_STEPS = 10_000


@options_lib.dataclass
class Balanced(options_lib.Named):
  """Options of `balanced`, which the docstring of `balance` explains."""

  low: float = options_lib.number(at_most=1.0)
  high: float = options_lib.number()
  low_step: float = options_lib.number(above=0.0)
  high_step: float = options_lib.number(above=0.0)
  low_limit: float = options_lib.number(at_most=1.0)
  high_limit: float = options_lib.number()
  positive_share: float = options_lib.number(at_most=1.0)

  @staticmethod
  def conflicts(low, high, low_limit, high_limit, low_step, high_step, **_):
    steps = {
      'low_step': (low_step, (low_limit - low) / low_step),
      'high_step': (high_step, (high_limit - high) / high_step),
    }
    for name, (step, count) in steps.items():
      if count > MAX_STEPS:
        rule = f'so large that the bound reaches its limit in {MAX_STEPS} steps'
        yield name, step, rule
    if high < 1:
      yield 'high', high, '1 or greater'
    if low_limit < low:
      yield 'low_limit', low_limit, f'{low} (low) or greater'
    if high_limit < high:
      yield 'high_limit', high_limit, f'{high} (high) or greater'


class _Interval(typing.NamedTuple):
  """The two bounds, or a number of steps for each of the two bounds."""

  low: Array
  high: Array


def balanced(
  context: LossContext, interval: _Interval, **options
) -> tuple[Array, Array]:
  """Returns the bounds that `balance` has found for the minibatch: BAPO."""
  del context, options
  return interval


def balance(
  context: LossContext,
  *,
  low: Number,
  high: Number,
  low_step: Number,
  high_step: Number,
  low_limit: Number,
  high_limit: Number,
  positive_share: Number,
) -> _Interval:
  """Returns bounds at which positive terms have at least a wanted share.

  The share of the terms with positive advantages in the clipped objective is

    sum_{A > 0} pi_old min(r A, clip(r) A) / sum pi_old |min(r A, clip(r) A)|

  The bounds start as `low` and `high`. While the share is below
  `positive_share`, first the upper bound grows in steps of high_step up to
  high_limit, and then the lower bound grows in steps of low_step up to
  low_limit. If both limits are reached, the share may be smaller than wanted.
  Source: arXiv 2510.18927. In its Eq. 8 the denominator is the absolute value
  of the whole sum. The sum of the terms' absolute values is our choice.
  """
  ratio_BL = context.ratio_at(context.level)
  advantages_BL, mask_BL = context.advantages_BL, context.mask_BL
  assert context.batch.old_logprobs_BL is not None
  old_BL = masking.select(context.batch.old_logprobs_BL, mask_BL)
  weight_BL = masking.select(jnp.exp(old_BL), mask_BL)

  dtype = ratio_BL.dtype
  # A bound is computed as its start plus the number of steps times the step's
  # size. Adding one step after the other would round each sum, and steps
  # smaller than the rounding error would never reach the limit.
  most = _Interval(
    _steps(low, low_limit, low_step), _steps(high, high_limit, high_step)
  )

  def interval_at(steps):
    return _Interval(
      jnp.minimum(low + steps.low * low_step, low_limit).astype(dtype),
      jnp.minimum(high + steps.high * high_step, high_limit).astype(dtype),
    )

  def too_negative(steps):
    interval = interval_at(steps)
    clipped_BL = jnp.clip(ratio_BL, interval.low, interval.high)
    term_BL = weight_BL * jnp.minimum(
      ratio_BL * advantages_BL, clipped_BL * advantages_BL
    )
    # The comparison multiplies by the denominator of the share instead of
    # dividing by it. The denominator is 0 in a minibatch without terms.
    positive = jnp.sum(jnp.maximum(term_BL, 0))
    magnitude = jnp.sum(jnp.abs(term_BL))
    can_move = (steps.high < most.high) | (steps.low < most.low)
    return (positive < positive_share * magnitude) & can_move

  def take_step(steps):
    # The method moves one bound at a time. `low` moves only after `high` has
    # reached its limit.
    widens = (steps.high < most.high).astype(jnp.int32)
    return _Interval(steps.low + 1 - widens, steps.high + widens)

  zero = jnp.zeros((), jnp.int32)
  start = _Interval(zero, zero)
  return interval_at(jax.lax.while_loop(too_negative, take_step, start))


def _steps(start, limit, step):
  """Returns the number of steps from the start of a bound to its limit."""
  count = jnp.ceil((limit - start) / step)
  return jnp.clip(count, 0, MAX_STEPS).astype(jnp.int32)
