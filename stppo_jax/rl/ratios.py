"""Importance ratios of tokens, or of segments of tokens, and their gradients.

B trajectories, L tokens, T turns. With l = log pi_theta - log pi_old, the
ratio of segment k is

  log r_k = sum_{l in k} l / |k|   (reduce='mean', the geometric mean)
  log r_k = sum_{l in k} l         (reduce='sum')

and all tokens of the segment share it. Sources: arXiv 2511.20718 Eq. 4 for the
turn ratio, GSPO (arXiv 2507.18071) for the sequence ratio.
"""

import chex
import jax

from stppo_jax import batch as batch_lib
from stppo_jax.rl import masking
from stppo_jax.rl import normalization
from stppo_jax.rl import options
from stppo_jax.rl import segments as segments_lib

Array = jax.Array
sg = jax.lax.stop_gradient


def token_log_ratio(
  logprobs_BL: Array, old_logprobs_BL: Array, loss_mask_BL: Array
) -> Array:
  """Returns clip(log pi_theta - log pi_old, -20, 20), 0 off the mask.

  A clipped token has no gradient.
  """
  chex.assert_equal_shape([logprobs_BL, old_logprobs_BL, loss_mask_BL])
  new_BL = masking.select(logprobs_BL, loss_mask_BL)
  # Detached: the old policy is data.
  old_BL = sg(masking.select(old_logprobs_BL, loss_mask_BL))
  return normalization.limit(new_BL - old_BL)


def _sum(log_ratio_BL, segments, *, implementation):
  totals_BT = segments_lib.segment_totals(
    log_ratio_BL, segments, implementation=implementation
  )
  # Clipped: the sum over a long segment would overflow in exp().
  totals_BT = normalization.limit(totals_BT)
  return segments_lib.segment_spread(
    totals_BT, segments, implementation=implementation
  )


REDUCES = {'mean': segments_lib.segment_means, 'sum': _sum}


def _through_segment(shared_BL, log_ratio_BL):
  """Returns the segment's value with the gradient of the whole segment."""
  del log_ratio_BL
  return shared_BL


def _through_token(shared_BL, log_ratio_BL):
  """Returns the segment's value with the token's own gradient: GSPO-token."""
  return sg(shared_BL) + (log_ratio_BL - sg(log_ratio_BL))


GRADIENTS = {'segment': _through_segment, 'token': _through_token}


@options.dataclass
class Ratio(options.Options):
  """The level on which tokens share a ratio, and the path of its gradient."""

  level: str = options.one_of(segments_lib.LEVELS)
  gradient: str = options.one_of(GRADIENTS)
  reduce: str = options.one_of(REDUCES)
  normalize: str = options.one_of(normalization.NORMALIZATIONS)


def level_log_ratio(
  log_ratio_BL: Array,
  batch: batch_lib.TokenBatch,
  *,
  level: str,
  gradient: str,
  reduce: str,
  num_turns: int,
  implementation: str = 'auto',
) -> Array:
  """Returns the log-ratio of every token at a level.

  Args:
    log_ratio_BL: the token log-ratio, 0 off the mask.
    batch: the batch, whose loss mask and ids of the level are read.
    level: a key of `segments.LEVELS`; at 'token' gradient and reduce change
      nothing.
    gradient: 'segment': d log r_k is the mean (or sum) over the segment of
      d log pi. 'token': the value is the same, but the gradient is d log pi of
      the token alone.
    reduce: 'mean' or 'sum'.
    num_turns: static, the most turns a row can have.
    implementation: the way segments are summed, see `segments`.

  Returns:
    [B, L], 0 off the mask, where the ratio is therefore 1.

  Raises:
    ValueError: the batch lacks the ids of the level.
  """
  chex.assert_equal_shape([log_ratio_BL, batch.loss_mask_BL])
  if level == 'token':  # a segment of one token is its own mean and sum
    return log_ratio_BL
  segments = segments_lib.level_segments(level, batch, num_turns=num_turns)
  shared_BL = REDUCES[reduce](
    log_ratio_BL, segments, implementation=implementation
  )
  return GRADIENTS[gradient](shared_BL, log_ratio_BL)
