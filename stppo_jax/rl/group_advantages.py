"""Advantages that compare the trajectories of one question; no value model.

B trajectories, L tokens, T turns. Rows of one question have the same number in
`group_ids_B` and form a group. An estimator is called
`estimator(rewards_BL, batch, **options)` and returns advantages [B, L].

The reward of a row, R, is the sum of `rewards_BL` over the row's loss mask.
Rows whose loss mask is false everywhere, and turns without a token in the loss
mask, count as absent. x_i - mean(x) is computed as the mean of the differences
x_i - x_j, so that equal rewards give exactly 0. With a rounded mean,
differences of about 1e-8 would remain, and the division by std + 1e-6 would
enlarge them. In a group of one row the advantage is 0, which is our choice:
verl and verl-agent give such a row its raw reward. All of this also holds for
`turn_advantages`, whose estimators compare turns.

The compared numbers form a vector, which has one number per trajectory, or one
number per turn of every trajectory. A square matrix has an entry for each pair
of numbers. In functions for both kinds of vectors, the names of vectors and
matrices have no shape suffix. With matrices there is no scatter and no sorting,
and on a mesh every device compares its own rows with all rows. A compiler for
accelerators fuses each matrix into the sum over it. On CPU the matrices take 5
bytes per pair.

Every token of a row has an advantage, observations and padding included,
because whitening may be over observation tokens.
`advantages.estimate_advantages` selects the policy tokens.
"""

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.rl import masking
from stppo_jax.rl import options as options_lib

Array = jax.Array


def rows(x_BL, batch):
  """Returns the sum of x over each row's loss mask, and a mask of pairs.

  The mask [B, B] is true where both rows belong to the same question and have a
  token in the loss mask.
  """
  mask_BL = batch.loss_mask_BL
  total_B, _ = masking.masked_total(x_BL, mask_BL, axis=1)
  return total_B, masking.pairs_of(batch.group_ids_B, jnp.any(mask_BL, axis=1))


def to_tokens(x_B, batch):
  return jnp.broadcast_to(x_B[:, None], batch.loss_mask_BL.shape)


@options_lib.dataclass
class Group(options_lib.Named):
  """Options that all estimators of groups share.

  Attributes:
    whiten: see `advantages.estimate_advantages`.
  """

  whiten: str = options_lib.one_of(masking.WHITENS)


@options_lib.dataclass
class GroupNormalized(Group):
  """Options of `group_normalized`; epsilon is added to std."""

  epsilon: float = options_lib.number(above=0.0)


def group_normalized(
  rewards_BL: Array,
  batch: batch_lib.TokenBatch,
  *,
  epsilon: Array | float,
) -> Array:
  """Returns (R - mean) / (std + epsilon) over the group: GRPO.

  R is the reward of a row. The standard deviation is unbiased, like torch.std,
  which verl and TRL use. epsilon is 1e-6 in verl and 1e-4 in TRL. Source: arXiv
  2402.03300.
  """
  reward_B, pairs_BB = rows(rewards_BL, batch)
  return to_tokens(masking.standardized(reward_B, pairs_BB, epsilon), batch)


def group_centered(rewards_BL: Array, batch: batch_lib.TokenBatch) -> Array:
  """Returns R - mean R over the group: Dr. GRPO and MiniRL.

  R is the reward of a row. Sources: arXiv 2503.20783, arXiv 2512.01374.
  """
  total_B, count_B = masking.differences(*rows(rewards_BL, batch))
  return to_tokens(masking.divide(total_B, count_B), batch)


def leave_one_out(rewards_BL: Array, batch: batch_lib.TokenBatch) -> Array:
  """Returns R - mean R over the other rows of the group: RLOO.

  R is the reward of a row. With G rows in the group, the advantage is
  G / (G - 1) times `group_centered`. Source: arXiv 2402.14740.
  """
  total_B, count_B = masking.differences(*rows(rewards_BL, batch))
  others_B = jnp.maximum(count_B - 1, 0)
  return to_tokens(masking.divide(total_B, others_B), batch)


ESTIMATORS = {
  'group_normalized': options_lib.Choice(group_normalized, GroupNormalized),
  'group_centered': options_lib.Choice(group_centered, Group),
  'leave_one_out': options_lib.Choice(leave_one_out, Group),
}
