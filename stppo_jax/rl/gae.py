"""Generalised advantage estimation over the steps of a row.

The module also has functions that move numbers between tokens and turns.

B trajectories, L tokens, T turns. `values_BL[:, l]` is V before token l. The
steps are the policy tokens, all tokens from the first to the last policy token,
or the turns.
"""

import chex
import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.rl import masking
from stppo_jax.rl import segments as segments_lib

Array = jax.Array


def gae(
  rewards_BL: Array,
  values_BL: Array,
  step_mask_BL: Array,
  *,
  end_mask_BL: Array | None = None,
  gamma: Array | float,
  lambda_: Array | float,
) -> Array:
  """Returns generalised advantage estimates over the steps of a row.

  With the steps of a row numbered 1..n and V_{n+1} = 0:

    delta_i = r_i + gamma V_{i+1} - V_i
    A_i = delta_i + gamma lambda A_{i+1}                 (arXiv 1506.02438)

  The scan carries value and advantage across tokens that are not steps, which
  gives the same numbers as deleting those tokens. A reward between two steps
  belongs to the step before it.

  Args:
    rewards_BL: the reward at each token, finite everywhere.
    values_BL: V before each token, read at the steps only.
    step_mask_BL: bool, the steps.
    end_mask_BL: bool, the steps after which the recursion starts anew
      (V_{i+1} = A_{i+1} = 0). With None the recursion runs over the whole row.
    gamma: discount per step.
    lambda_: trace decay per step.

  Returns:
    A at the steps, 0 elsewhere.
  """
  if end_mask_BL is None:
    end_mask_BL = jnp.zeros_like(step_mask_BL)
  chex.assert_equal_shape([rewards_BL, values_BL, step_mask_BL, end_mask_BL])
  values_BL = masking.select(values_BL, step_mask_BL)

  def previous(carry, token):
    # The carry holds the value and the advantage of the next step, and the sum
    # of the rewards between this token and the next step. These rewards belong
    # to the step before them, which the backward scan reaches later.
    value_B, advantage_B, reward_B = carry
    reward_now_B, value_now_B, step_B, end_B = token
    value_B = jnp.where(end_B, 0, value_B)
    advantage_B = jnp.where(end_B, 0, advantage_B)
    reward_B = reward_B + reward_now_B
    delta_B = reward_B + gamma * value_B - value_now_B
    advantage_B = jnp.where(
      step_B, delta_B + gamma * lambda_ * advantage_B, advantage_B
    )
    value_B = jnp.where(step_B, value_now_B, value_B)
    reward_B = jnp.where(step_B, 0, reward_B)
    return (value_B, advantage_B, reward_B), advantage_B

  zero_B = jnp.zeros_like(values_BL, shape=values_BL.shape[:1])
  _, advantages_LB = jax.lax.scan(
    previous,
    (zero_B, zero_B, zero_B),
    (rewards_BL.T, values_BL.T, step_mask_BL.T, end_mask_BL.T),
    reverse=True,
  )
  return masking.select(advantages_LB.T, step_mask_BL)


# Maps the option `observation_tokens` to a function that returns the mask of
# the steps. The reference implementation of arXiv 2511.20718 uses 'included'.
OBSERVATION_TOKENS = {
  'skipped': lambda loss_mask_BL: loss_mask_BL,
  'included': masking.response_mask,
}


def latest(x_BL: Array, step_mask_BL: Array) -> Array:
  """Returns for every token the x of the last step at or before the token.

  Tokens before the first step get x at token 0.

  Args:
    x_BL: a number for each token; only the numbers at the steps are used.
    step_mask_BL: bool, the steps.
  """
  position_BL = jax.lax.broadcasted_iota(jnp.int32, x_BL.shape, 1)
  step_BL = jax.lax.cummax(jnp.where(step_mask_BL, position_BL, 0), axis=1)
  return jnp.take_along_axis(x_BL, step_BL, axis=1)


def turns_so_far(batch: batch_lib.TokenBatch) -> Array:
  """Returns the latest turn id at or before each token; 0 before turn 1."""
  return jax.lax.cummax(_turn_ids(batch), axis=1)


def turn_starts(batch: batch_lib.TokenBatch) -> Array:
  """Returns a mask of the first token of each turn."""
  return segments_lib.segment_starts(segments_lib.Segments(_turn_ids(batch), 0))


def _turn_ids(batch):
  return jnp.where(batch.loss_mask_BL, batch.turn_ids_BL, 0)


def by_turn(
  rewards_BL: Array, batch: batch_lib.TokenBatch, num_turns: int
) -> tuple[Array, Array, segments_lib.Segments]:
  """Sums the rewards of each turn.

  Returns:
    The sums [B, T], a mask [B, T] of the turns that exist, and the turns as
    `Segments`.
  """
  turns = segments_lib.level_segments('turn', batch, num_turns=num_turns)
  starts_BL = segments_lib.segment_starts(turns)
  # Rewards on tokens outside all turns are left out of the sums.
  rewards_BT = segments_lib.segment_totals(rewards_BL, turns)
  present_BT = segments_lib.segment_totals(starts_BL.astype(jnp.int32), turns)
  return rewards_BT, present_BT > 0, turns


def rewards_to_go(
  rewards_BT: Array, present_BT: Array, gamma: Array | float
) -> Array:
  """Returns the discounted reward-to-go of each turn.

  The sum skips absent turns: they add neither a reward nor a discount.
  """

  def previous(to_go_B, turn):
    reward_B, present_B = turn
    to_go_B = jnp.where(present_B, reward_B + gamma * to_go_B, to_go_B)
    return to_go_B, to_go_B

  zero_B = jnp.zeros_like(rewards_BT, shape=rewards_BT.shape[:1])
  _, to_go_TB = jax.lax.scan(
    previous, zero_B, (rewards_BT.T, present_BT.T), reverse=True
  )
  return to_go_TB.T


def turns_to_tokens(x_BT: Array, batch: batch_lib.TokenBatch) -> Array:
  """Returns for every token the x of the latest turn at or before the token."""
  segments = segments_lib.Segments(turns_so_far(batch), x_BT.shape[1])
  return segments_lib.segment_spread(x_BT, segments)


def _turn_ends(batch):
  """Returns a mask of the last token of each turn."""
  none = jnp.iinfo(batch.turn_ids_BL.dtype).max
  ids_BL = jnp.where(batch.loss_mask_BL, batch.turn_ids_BL, none)
  # Turn ids never decrease, so the smallest id after a token is the id of the
  # next policy token. If that id is greater, the turn ends at this token.
  smallest_BL = jax.lax.cummin(ids_BL, axis=1, reverse=True)
  after_BL = jnp.pad(smallest_BL[:, 1:], ((0, 0), (0, 1)), constant_values=none)
  return ids_BL < after_BL


def bilevel_gae(
  rewards_BL: Array,
  batch: batch_lib.TokenBatch,
  *,
  gamma: Array | float,
  lambda_: Array | float,
  gamma_turn: Array | float,
  lambda_turn: Array | float,
) -> Array:
  """Returns GAE over the tokens of each turn, after GAE over the turns.

  GAE over the turns gives each turn an advantage. This advantage plus the value
  at the turn's first token becomes the reward of the turn's last token. The
  other tokens have no reward. `advantages.gae_estimator` has the equations. The
  result has an advantage at each policy token.
  """
  starts_BL = turn_starts(batch)
  turn_advantages_BL = gae(
    rewards_BL,
    batch.values_BL,
    starts_BL,
    gamma=gamma_turn,
    lambda_=lambda_turn,
  )
  turn_returns_BL = turn_advantages_BL + masking.select(
    batch.values_BL, starts_BL
  )
  ends_BL = _turn_ends(batch)
  return gae(
    masking.select(latest(turn_returns_BL, starts_BL), ends_BL),
    batch.values_BL,
    batch.loss_mask_BL,
    end_mask_BL=ends_BL,
    gamma=gamma,
    lambda_=lambda_,
  )
