"""The arrays that bounds, objectives and corrections read.

B trajectories, L tokens, T segments of a row. Bounds, objectives and
corrections are computed from the same arrays: ratios at every level,
log-probabilities, advantages, entropies and masks. A `LossContext` holds these
arrays for one microbatch. The numbers that a rule needs from the whole
minibatch are called its `statistics`. They are formed before the loss, without
gradient, from a `LossContext` of the whole minibatch.
"""

from collections.abc import Callable
import dataclasses
import typing

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.rl import masking
from stppo_jax.rl import ratios
from stppo_jax.rl import segments as segments_lib

Array = jax.Array
sg = jax.lax.stop_gradient


class TermWeights(typing.NamedTuple):
  """The output of a correction: detached weights of the loss's terms, [B, L].

  Attributes:
    policy_BL: multiplies the policy terms.
    value_BL: multiplies the value terms.
    bias_BL: the factor of log pi in the term whose gradient is the bias c, see
      `clipping_bias`; 0 if the correction has no such term.
  """

  policy_BL: Array
  value_BL: Array
  bias_BL: Array


def policy_weights(weights_BL: Array) -> TermWeights:
  """Returns term weights that multiply the policy terms only."""
  return TermWeights(
    # Detached, so that no gradient flows through a weight.
    sg(weights_BL),
    jnp.ones_like(weights_BL),
    jnp.zeros_like(weights_BL),
  )


@dataclasses.dataclass(frozen=True)
class LossContext:
  """The arrays of one microbatch, or of a whole minibatch.

  Attributes:
    ratio_at: function of a level that returns the ratio [B, L], differentiable,
      1 off the mask.
    level: the level of the algorithm's ratio, a key of `segments.LEVELS`.
    advantages_BL: the advantages, detached, 0 off the mask.
    entropy_BL: the policy's entropy at each token in nats, detached, 0 off the
      mask.
    logprobs_BL: log pi_theta of the tokens, differentiable, 0 off the mask.
    batch: masks, ids, and the log-probabilities of old policy and sampler.
    num_turns: static, the most turns a row can have.
  """

  ratio_at: Callable[[str], Array]
  level: str
  advantages_BL: Array
  entropy_BL: Array
  logprobs_BL: Array
  batch: batch_lib.TokenBatch
  num_turns: int

  @property
  def mask_BL(self) -> Array:
    """The loss mask."""
    return self.batch.loss_mask_BL

  @property
  def ratio_BL(self) -> Array:
    """The ratio at the algorithm's level, differentiable, 1 off the mask."""
    return self.ratio_at(self.level)

  def segments(self, level: str) -> segments_lib.Segments:
    """Returns the segments of a level; for the level 'turn', the turns."""
    return segments_lib.level_segments(
      level, self.batch, num_turns=self.num_turns
    )

  def spread(self, x_BT: Array, segments: segments_lib.Segments) -> Array:
    """Returns for every token the x of the token's segment: [B, L]."""
    return segments_lib.segment_spread(x_BT, segments)

  def mean(self, x_BL: Array, level: str) -> Array:
    """Returns for every token its segment's mean of x; 0 off the mask."""
    x_BL = masking.select(x_BL, self.mask_BL)
    if level == 'token':  # each token is its own segment
      return x_BL
    return segments_lib.segment_means(x_BL, self.segments(level))

  def log_mismatch(self, level: str, reduce: str) -> Array:
    """Returns log k = log pi_old (trainer) - log mu (sampler) at a level.

    Args:
      level: a key of `segments.LEVELS`.
      reduce: whether the log-ratios of a segment are averaged ('mean') or added
        ('sum').

    Returns:
      The mean or the sum over each token's segment, detached, clipped to
      [-20, 20], 0 off the mask; [B, L].
    """
    assert self.batch.old_logprobs_BL is not None
    log_k_BL = ratios.token_log_ratio(
      self.batch.old_logprobs_BL, self.batch.sampler_logprobs_BL, self.mask_BL
    )
    return sg(  # detached, because both log-probabilities are data
      ratios.level_log_ratio(
        log_k_BL,
        self.batch,
        level=level,
        gradient='segment',
        reduce=reduce,
        num_turns=self.num_turns,
      )
    )
