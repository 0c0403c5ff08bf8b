"""Chooses tokens by the covariance of their advantage and log-probability.

B trajectories, L tokens. The covariance of a token is its part in the
covariance over the policy tokens of the whole minibatch,

  (A - mean A) (log pi - mean log pi)

It says how much the token's update changes the entropy: a likely token with a
high advantage lowers it. Source: arXiv 2505.22617.
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
    share: how many tokens are cut, as a share of the policy tokens.
    least, most: the covariances between which a token may be cut.
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
    share: how many tokens are held back, as a share of the policy tokens.
    coefficient: the weight of their penalty.
  """

  share: float = options_lib.number(above=0.0, at_most=1.0)
  coefficient: float = options_lib.number()


class Covariance(typing.NamedTuple):
  """The numbers of the whole minibatch that choose tokens, all scalars.

  Attributes:
    advantage: the mean of A over the policy tokens.
    logprob: the mean of log pi over them.
    threshold: a token is chosen if what is compared is this or more.
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
    """Returns a threshold that the largest x of the eligible tokens exceed.

    Args:
      x_BL: what is compared.
      eligible_BL: bool, the tokens that may be chosen.
      mask_BL: the policy tokens.
      share: how many are chosen, as a share of the policy tokens: at least one,
        and all that are eligible if those are fewer.
    """
    # Tokens that may not be chosen are sorted to the front. If there are too
    # few others, the threshold is -inf, which chooses all of them.
    count = (jnp.sum(mask_BL) * share).astype(jnp.int32)
    ordered = jnp.sort(jnp.where(eligible_BL, x_BL, -jnp.inf), axis=None)
    last = ordered.size - jnp.maximum(count, 1)
    # Midway between two tokens: the loss forms x again in another program, and
    # its rounding must not decide about the last token.
    between = (ordered[last] + ordered[jnp.maximum(last - 1, 0)]) / 2
    return self._replace(threshold=between)


def means(context: LossContext) -> Covariance:
  """Returns the means, with a threshold that chooses nothing."""
  mask_BL = context.mask_BL
  return Covariance(
    masking.masked_mean(context.advantages_BL, mask_BL),
    masking.masked_mean(context.logprobs_BL, mask_BL),
    jnp.asarray(jnp.inf, context.logprobs_BL.dtype),
  )


def lots(context: LossContext) -> Array:
  """Returns a random number in [0, 1) for every token: [B, L].

  It is a function of the token's own stored numbers, so neither microbatches
  nor the order of rows change it.
  """
  key = jax.random.key(0, impl='threefry2x32')
  old_logprobs_BL = context.batch.old_logprobs_BL
  assert old_logprobs_BL is not None

  def draw(*numbers):
    own = key
    for number in numbers:
      own = jax.random.fold_in(own, number)
    return jax.random.uniform(own, dtype=context.logprobs_BL.dtype)

  # The bits of the numbers and not their values: fold_in takes integers, and
  # rounding would give many tokens the same lot.
  bits = [
    jax.lax.bitcast_convert_type(x_BL.astype(jnp.float32), jnp.uint32)
    for x_BL in (
      masking.select(old_logprobs_BL, context.mask_BL),
      context.advantages_BL,
    )
  ]
  return jax.vmap(jax.vmap(draw))(*bits)
