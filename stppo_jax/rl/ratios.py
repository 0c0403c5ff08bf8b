"""Importance ratios of tokens, or of segments of tokens, and their gradients.

B trajectories, L tokens, T turns. With l = log pi_theta - log pi_old of a
token, the ratio r_k of segment k is given by

  log r_k = sum_{l in k} l / |k|   (reduce='mean', the geometric mean)
  log r_k = sum_{l in k} l         (reduce='sum')

and all tokens of the segment share r_k. Sources: arXiv 2511.20718 Eq. 4 for the
turn ratio, GSPO (arXiv 2507.18071) for the sequence ratio.

The tokens' log-ratios may be normalised before ratios are formed from them. A
normalisation is called `normalize(log_ratio_BL, batch, statistics, *,
num_turns)` and returns the new log-ratio and a detached multiplier of each
policy term. `statistics` is the result of its `Choice.statistics` for the whole
minibatch, or () for a normalisation without statistics.

The normalisation `guard` applies GRPO-Guard (arXiv 2510.22319), which was
published for flow matching, to tokens. It is experimental, and the form for
tokens is our choice. The published form is r = exp((l + b) sigma sqrt(dt)), in
the notation of the paper. Our form for turn k is

  l'  = clip((l - m_k) s_k, -20, 20)
  m_k = mean over the turn of l
  s_k = clip(target / std over the turn of l, 1/10, 10)

m_k is the systematic shift of the turn's log-ratio. (The shift could also be
estimated by the mean of e^l - 1 - l, but this estimate is unbounded: one token
with l = 7 would multiply the ratios of its whole turn by e^100.) The standard
deviation of l over a turn is called the spread of the turn. s_k gives every
turn the same spread, `target`, which is the mean spread of the minibatch's
turns. Turns with a spread near 0 have s_k = 1. Terms of turn k are divided by
s_k, so that the scaling of the log-ratio does not scale the gradient. With the
aggregate turn_mean, all turns then contribute equally.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.rl import masking
from stppo_jax.rl import options
from stppo_jax.rl import segments as segments_lib

Array = jax.Array
sg = jax.lax.stop_gradient

LOG_RATIO_LIMIT = 20.0  # exp(20) is 5e8, whose square does not overflow

# We chose these two numbers. The scale s_k (see the module's docstring) is
# clipped to [1 / GUARD_LIMIT, GUARD_LIMIT]. If the spread of a turn's
# log-ratios is at most GUARD_LEAST_SPREAD, they differ by rounding only, and
# s_k is 1.
GUARD_LIMIT = 10.0
GUARD_LEAST_SPREAD = 1e-6


def limit(log_ratio: Array) -> Array:
  """Returns clip(log_ratio, -20, 20), so that no ratio overflows."""
  return jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def token_log_ratio(
  logprobs_BL: Array, old_logprobs_BL: Array, loss_mask_BL: Array
) -> Array:
  """Returns clip(log pi_theta - log pi_old, -20, 20), 0 off the mask.

  A clipped token has no gradient.
  """
  chex.assert_equal_shape([logprobs_BL, old_logprobs_BL, loss_mask_BL])
  new_BL = masking.select(logprobs_BL, loss_mask_BL)
  # Detached, because the old policy is data.
  old_BL = sg(masking.select(old_logprobs_BL, loss_mask_BL))
  return limit(new_BL - old_BL)


def _sum(log_ratio_BL, segments):
  # The totals are limited, because exp() of a long segment's sum would
  # overflow.
  totals_BT = limit(segments_lib.segment_totals(log_ratio_BL, segments))
  return segments_lib.segment_spread(totals_BT, segments)


REDUCES = {'mean': segments_lib.segment_means, 'sum': _sum}


GRADIENTS = ('segment', 'token')


def _none(log_ratio_BL, batch, statistics, *, num_turns):
  del batch, statistics, num_turns
  return log_ratio_BL, jnp.ones_like(log_ratio_BL)


class _Turns(NamedTuple):
  """The mean and the spread of the log-ratio l in each turn.

  Attributes:
    segments: the turns.
    mean_BT: m_k, the mean of l.
    spread_BT: the standard deviation of l.
    varies_BT: bool, whether the spread is above `GUARD_LEAST_SPREAD`.
  """

  segments: segments_lib.Segments
  mean_BT: Array
  spread_BT: Array
  varies_BT: Array


def _turns(log_ratio_BL, batch, num_turns):
  turns = segments_lib.level_segments('turn', batch, num_turns=num_turns)
  # Detached, so that no gradient flows through shift and scale.
  log_ratio_BL = sg(log_ratio_BL)

  def means(x_BL):
    return masking.divide(segments_lib.segment_totals(x_BL, turns), counts_BT)

  counts_BT = segments_lib.segment_counts(turns, log_ratio_BL.dtype)
  mean_BT = means(log_ratio_BL)
  mean_BL = segments_lib.segment_spread(mean_BT, turns)
  spread_BT = jnp.sqrt(means(jnp.square(log_ratio_BL - mean_BL)))
  return _Turns(turns, mean_BT, spread_BT, spread_BT > GUARD_LEAST_SPREAD)


def _guard(log_ratio_BL, batch, target, *, num_turns):
  turns = _turns(log_ratio_BL, batch, num_turns)
  scale_BT = jnp.clip(
    target / jnp.where(turns.varies_BT, turns.spread_BT, 1),
    1 / GUARD_LIMIT,
    GUARD_LIMIT,
  )
  scale_BT = jnp.where(turns.varies_BT, scale_BT, 1)

  def spread(x_BT):
    return segments_lib.segment_spread(x_BT, turns.segments)

  scale_BL = jnp.where(batch.loss_mask_BL, spread(scale_BT), 1)
  normal_BL = (log_ratio_BL - spread(turns.mean_BT)) * scale_BL
  # Limited again, because shift and scale can enlarge a log-ratio.
  normal_BL = limit(normal_BL)
  return masking.select(normal_BL, batch.loss_mask_BL), 1 / scale_BL


def _guard_target(log_ratio_BL, batch, *, num_turns):
  """Returns the target: the mean spread of the turns whose log-ratios vary.

  The spread of a turn is the standard deviation of its tokens' log-ratios.
  """
  turns = _turns(log_ratio_BL, batch, num_turns)
  return masking.masked_mean(turns.spread_BT, turns.varies_BT)


NORMALIZATIONS = {
  'none': options.Choice(_none),
  'guard': options.Choice(_guard, statistics=_guard_target),
}


@options.dataclass
class Ratio(options.Options):
  """Options of the ratio: its level, gradient, reduction and normalisation."""

  level: str = options.one_of(segments_lib.LEVELS)
  gradient: str = options.one_of(GRADIENTS)
  reduce: str = options.one_of(REDUCES)
  normalize: str = options.one_of(NORMALIZATIONS)


def level_log_ratio(
  log_ratio_BL: Array,
  batch: batch_lib.TokenBatch,
  *,
  level: str,
  gradient: str,
  reduce: str,
  num_turns: int,
) -> Array:
  """Returns the log-ratio of every token at a level.

  Args:
    log_ratio_BL: the token log-ratio, 0 off the mask.
    batch: the batch, whose loss mask and ids of the level are read.
    level: a key of `segments.LEVELS`; at 'token', gradient and reduce have no
      effect.
    gradient: 'segment': d log r_k is the mean (or sum) over the segment of
      d log pi. 'token': the value is the same, but the gradient is d log pi of
      the token alone.
    reduce: whether the log-ratio of a segment is the 'mean' or the 'sum' of its
      tokens' log-ratios.
    num_turns: static, the most turns a row can have.

  Returns:
    The log-ratios [B, L], 0 off the mask, so that the ratio is 1 there.
  """
  chex.assert_equal_shape([log_ratio_BL, batch.loss_mask_BL])
  if level == 'token':  # each token is its own segment
    return log_ratio_BL
  segments = segments_lib.level_segments(level, batch, num_turns=num_turns)
  shared_BL = REDUCES[reduce](log_ratio_BL, segments)
  if gradient == 'segment':
    return shared_BL
  # The result has the value of the segment and the gradient of the token alone,
  # as in GSPO-token.
  return sg(shared_BL) + (log_ratio_BL - sg(log_ratio_BL))
