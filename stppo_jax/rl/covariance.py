"""Chooses tokens by the covariance of their advantage and log-probability.

B trajectories, L tokens. The covariance of a token is its summand in the
covariance over the policy tokens of the whole minibatch,

  (A - mean A) (log pi - mean log pi)

This number says how much the token's update changes the entropy: a likely token
with a high advantage lowers the entropy. Source: arXiv 2505.22617.
"""

import typing

import jax
import jax.numpy as jnp

from stppo_jax.rl import loss_context as loss_context_lib
from stppo_jax.rl import masking
from stppo_jax.rl import options as options_lib

Array = jax.Array
LossContext = loss_context_lib.LossContext
sg = jax.lax.stop_gradient


@options_lib.dataclass
class ClipCov(options_lib.Named):
  """Options of the objective `clip_cov`.

  Attributes:
    share: the share of the policy tokens that is chosen. The terms of chosen
      tokens are set to 0.
    least, most: only tokens whose covariance lies between these two limits may
      be chosen.
  """

  share: float = options_lib.number(above=0.0, at_most=1.0)
  least: float = options_lib.number()
  most: float = options_lib.number(infinite=True)

  @staticmethod
  def conflicts(least, most, **_):
    if most <= least:
      yield 'most', most, f'greater than {least} (least)'


@options_lib.dataclass
class KlCov(options_lib.Named):
  """Options of the objective `kl_cov`.

  Attributes:
    share: the share of the policy tokens that is chosen and gets a penalty.
    coefficient: the weight of the penalty.
  """

  share: float = options_lib.number(above=0.0, at_most=1.0)
  coefficient: float = options_lib.number()


class Covariance(typing.NamedTuple):
  """The scalars of the whole minibatch that decide which tokens are chosen.

  Attributes:
    advantage: the mean of A over the policy tokens.
    logprob: the mean of log pi over the policy tokens.
    threshold: an eligible token is chosen if its number is at least this
      threshold. The number of a token is its covariance or, in the objective
      `clip_cov`, its random number from `lots`.
  """

  advantage: Array
  logprob: Array
  threshold: Array

  def of(self, context: LossContext) -> Array:
    """Returns the covariance of every token, detached: [B, L]."""
    return sg(
      (context.advantages_BL - self.advantage)
      * (context.logprobs_BL - self.logprob)
    )

  def choosing(
    self,
    x_BL: Array,
    eligible_BL: Array,
    mask_BL: Array,
    share: Array | float,
  ) -> 'Covariance':
    """Returns these scalars with a threshold that a share of tokens reaches.

    The chosen tokens are the eligible tokens with the largest x. At least one
    token is chosen if any is eligible. If fewer tokens than the share are
    eligible, all eligible tokens are chosen.

    Args:
      x_BL: for each token the number that is compared with the threshold.
      eligible_BL: bool, the tokens that may be chosen.
      mask_BL: the policy tokens.
      share: the share of the policy tokens that is chosen.
    """
    # The x of tokens that may not be chosen is replaced by -inf, which is
    # sorted to the front. If there are too few eligible tokens, the threshold
    # is -inf, which chooses all of them.
    count = (jnp.sum(mask_BL) * share).astype(jnp.int32)
    ordered = jnp.sort(jnp.where(eligible_BL, x_BL, -jnp.inf), axis=None)
    last = ordered.size - jnp.maximum(count, 1)
    # The threshold is midway between the x of two tokens, because the loss
    # computes x again in another program, and a rounding difference must not
    # decide whether the last token is chosen.
    between = (ordered[last] + ordered[jnp.maximum(last - 1, 0)]) / 2
    return self._replace(threshold=between)


def means(context: LossContext) -> Covariance:
  """Returns the means of A and log pi, with a threshold of infinity.

  No token reaches this threshold. `choosing` replaces it.
  """
  mask_BL = context.mask_BL
  return Covariance(
    masking.masked_mean(context.advantages_BL, mask_BL),
    masking.masked_mean(context.logprobs_BL, mask_BL),
    jnp.asarray(jnp.inf, context.logprobs_BL.dtype),
  )


def lots(context: LossContext) -> Array:
  """Returns a random number in [0, 1) for every token: [B, L].

  The number is a function of the token's old log-probability and advantage, so
  neither microbatches nor the order of rows change it.
  """
  key = jax.random.key(0, impl='threefry2x32')
  old_logprobs_BL = context.batch.old_logprobs_BL
  assert old_logprobs_BL is not None

  def draw(*numbers):
    own = key
    for number in numbers:
      own = jax.random.fold_in(own, number)
    return jax.random.uniform(own, dtype=context.logprobs_BL.dtype)

  # `fold_in` takes integers. So it gets the bits of the two numbers, because
  # rounding the numbers to integers would give many tokens the same lot.
  bits = [
    jax.lax.bitcast_convert_type(x_BL.astype(jnp.float32), jnp.uint32)
    for x_BL in (
      masking.select(old_logprobs_BL, context.mask_BL),
      context.advantages_BL,
    )
  ]
  return jax.vmap(jax.vmap(draw))(*bits)
