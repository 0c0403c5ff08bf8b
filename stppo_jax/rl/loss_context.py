"""What the rules of the five axes may look at, and what a correction asks for.

B trajectories, L tokens. Bounds and corrections decide from the same arrays:
ratios at every level, advantages, entropies, masks. Two of their needs differ:
some of what they look at is of one microbatch, some of the whole minibatch.
The latter are `statistics`, formed before the loss by a pass without gradient.
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


class Correction(typing.NamedTuple):
  """What one correction asks for: detached, [B, L].

  Attributes:
    weights_BL: multiplier of the policy terms.
    value_weights_BL: multiplier of the value terms.
    bias_BL: factor of log pi in the bias whose gradient is c, see
      `clipping_bias`.
  """

  weights_BL: Array
  value_weights_BL: Array
  bias_BL: Array


def of_policy(weights_BL: Array) -> Correction:
  """Multiplies the policy terms and nothing else."""
  return Correction(
    # A weight measures; it is not what is learned.
    sg(weights_BL),
    jnp.ones_like(weights_BL),
    jnp.zeros_like(weights_BL),
  )


@dataclasses.dataclass(frozen=True)
class LossContext:
  """The arrays of one microbatch, or of a whole minibatch.

  Attributes:
    ratio_at: gives the ratio [B, L] at a level, differentiable, 1 off the mask.
    level: at which the row has its ratio.
    advantages_BL: 0 off the mask.
    entropy_BL: of the policy at each token, 0 off the mask.
    batch: masks, ids, the old and the sampler's log-probabilities.
    num_turns: static, the most turns a row can have.
    implementation: of the segment sums.
  """

  ratio_at: Callable[[str], Array]
  level: str
  advantages_BL: Array
  entropy_BL: Array
  batch: batch_lib.TokenBatch
  num_turns: int
  implementation: str = 'auto'

  @property
  def mask_BL(self) -> Array:
    """The loss mask."""
    return self.batch.loss_mask_BL

  def segments(self, level: str) -> segments_lib.Segments:
    """The segments of a level."""
    return segments_lib.level_segments(
      level, self.batch, num_turns=self.num_turns
    )

  def totals(self, x_BL: Array, segments: segments_lib.Segments) -> Array:
    """Sums over segments: [B, T]."""
    return segments_lib.segment_totals(
      x_BL, segments, implementation=self.implementation
    )

  def spread(self, x_BT: Array, segments: segments_lib.Segments) -> Array:
    """Each token gets its segment's value: [B, L]."""
    return segments_lib.segment_spread(
      x_BT, segments, implementation=self.implementation
    )

  def log_mismatch(self, level: str) -> Array:
    """log k = log pi_old (trainer) - log mu (sampler), summed at a level.

    Detached, clipped to [-20, 20], 0 off the mask; [B, L].

    Raises:
      ValueError: the batch lacks the sampler's log-probabilities.
    """
    if self.batch.sampler_logprobs_BL is None:
      raise ValueError('a mismatch correction needs sampler_logprobs_BL')
    log_k_BL = ratios.token_log_ratio(
      self.batch.old_logprobs_BL, self.batch.sampler_logprobs_BL, self.mask_BL
    )
    return sg(  # both are data
      ratios.level_log_ratio(
        log_k_BL,
        self.batch,
        level=level,
        gradient='segment',
        reduce='sum',
        num_turns=self.num_turns,
        implementation=self.implementation,
      )
    )

  def mean(self, x_BL: Array, level: str) -> Array:
    """The mean over each token's segment of a level: [B, L], 0 off the mask."""
    x_BL = masking.select(x_BL, self.mask_BL)
    if level == 'token':
      return x_BL
    return segments_lib.segment_means(
      x_BL, self.segments(level), implementation=self.implementation
    )
