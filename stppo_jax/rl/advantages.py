"""Advantages, returns and the steps at which the critic is trained.

B trajectories, L tokens. `values_BL[:, l]` is V before token l. An estimator
is called `estimator(rewards_BL, batch, **options)`.

Only rewards on policy tokens count, so the outcome must stand on the last
policy token. Nothing is bootstrapped at the end of a row. A row whose loss
mask is false everywhere is as if it were absent.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.rl import masking
from stppo_jax.rl import segments as segments_lib

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Advantages:
  """What an estimator made; all 0 (false) off the loss mask.

  Attributes:
    advantages_BL: as the policy loss uses them.
    returns_BL: the critic's targets, formed before any whitening.
    value_mask_BL: bool, the steps at which the critic is trained.
  """

  advantages_BL: Array
  returns_BL: Array
  value_mask_BL: Array


def gae(
  rewards_BL: Array,
  values_BL: Array,
  step_mask_BL: Array,
  *,
  gamma: Array | float,
  lambda_: Array | float,
) -> Array:
  """Generalised advantage estimation over the steps of a row.

  With the steps of a row numbered 1..n and V_{n+1} = 0:

    delta_i = r_i + gamma V_{i+1} - V_i
    A_i = delta_i + gamma lambda A_{i+1}                 (arXiv 1506.02438)

  Value and accumulator are carried across tokens that are not steps, which
  equals deleting those tokens. A reward between two steps belongs to the
  step before it.

  Returns:
    A at the steps, 0 elsewhere.
  """
  chex.assert_equal_shape([rewards_BL, values_BL, step_mask_BL])
  values_BL = masking.select(values_BL, step_mask_BL)

  def previous(carry, token):
    value_B, advantage_B, reward_B = carry  # of the step to the right
    reward_now_B, value_now_B, step_B = token
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
    (rewards_BL.T, values_BL.T, step_mask_BL.T),
    reverse=True,
  )
  return masking.select(advantages_LB.T, step_mask_BL)


def _skipped(loss_mask_BL):
  return loss_mask_BL


def _included(loss_mask_BL):
  """All tokens from a row's first policy token to its last."""
  policy_BL = loss_mask_BL.astype(jnp.int32)
  begun_BL = jax.lax.cummax(policy_BL, axis=1) > 0
  to_come_BL = jax.lax.cummax(policy_BL, axis=1, reverse=True) > 0
  return begun_BL & to_come_BL


# 'included' is what the reference run of arXiv 2511.20718 did.
OBSERVATION_TOKENS = {'skipped': _skipped, 'included': _included}


def _token_steps(batch, observation_tokens):
  return OBSERVATION_TOKENS[observation_tokens](batch.loss_mask_BL)


def _turn_steps(batch, observation_tokens):
  del observation_tokens  # a turn's step is its first token, always skipped
  turn_ids_BL = jnp.where(batch.loss_mask_BL, batch.turn_ids_BL, 0)
  return segments_lib.segment_starts(segments_lib.Segments(turn_ids_BL, 0))


STEPS = {'token': _token_steps, 'turn': _turn_steps}


def _latest(x_BL, step_mask_BL):
  """The value at the last step at or before each token."""
  position_BL = jax.lax.broadcasted_iota(jnp.int32, x_BL.shape, 1)
  step_BL = jax.lax.cummax(jnp.where(step_mask_BL, position_BL, 0), axis=1)
  return jnp.take_along_axis(x_BL, step_BL, axis=1)


def gae_estimator(
  rewards_BL: Array,
  batch: batch_lib.TokenBatch,
  *,
  gamma: Array | float,
  lambda_: Array | float,
  steps: str,
  observation_tokens: str,
) -> Advantages:
  """GAE at token or turn steps, spread over the policy tokens.

  Args:
    rewards_BL: the outcome, minus a KL penalty where there is one.
    batch: masks, turn ids and values.
    gamma: discount per step.
    lambda_: trace decay per step.
    steps: 'token': every policy token. 'turn': the first token of a turn; the
      turn's rewards are summed into it, its advantage goes to all its tokens,
      and the critic is trained there only.
    observation_tokens: of token steps: 'skipped', or 'included' between the
      first and the last policy token of a row.
  """
  mask_BL = batch.loss_mask_BL
  step_mask_BL = STEPS[steps](batch, observation_tokens)
  at_steps_BL = gae(
    masking.select(rewards_BL, mask_BL),
    batch.values_BL,
    step_mask_BL,
    gamma=gamma,
    lambda_=lambda_,
  )
  values_BL = masking.select(batch.values_BL, step_mask_BL)
  return Advantages(
    advantages_BL=masking.select(_latest(at_steps_BL, step_mask_BL), mask_BL),
    returns_BL=masking.select(
      _latest(at_steps_BL + values_BL, step_mask_BL), mask_BL
    ),
    value_mask_BL=step_mask_BL & mask_BL,
  )


ADVANTAGES = {'gae': gae_estimator}


def _as_is(x_BL, mask_BL):
  del mask_BL
  return x_BL


WHITENS = {'none': _as_is, 'policy': masking.whiten}


def estimate_advantages(
  rewards_BL: Array,
  batch: batch_lib.TokenBatch,
  *,
  name: str,
  whiten: str,
  **options,
) -> Advantages:
  """Advantages of a whole collected batch, before it is cut in minibatches.

  Call it with `**algorithm.advantage.arguments()`. Under jit on global arrays
  the whitening is over all hosts.

  Args:
    rewards_BL: the outcome, minus a KL penalty where there is one.
    batch: masks, turn ids, group ids and values.
    name: a key of `ADVANTAGES`.
    whiten: 'none', or 'policy': mean 0 and variance 1 over the policy tokens,
      the variance unbiased.
    **options: of the estimator.
  """
  estimate = ADVANTAGES[name](rewards_BL, batch, **options)
  return dataclasses.replace(
    estimate,
    advantages_BL=WHITENS[whiten](estimate.advantages_BL, batch.loss_mask_BL),
  )
