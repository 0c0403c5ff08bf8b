"""Advantages that compare the turns of one question; no value model.

B trajectories, L tokens, T turns. The estimators compare the reward of each
turn, or its reward-to-go. `group_advantages` explains the signature, groups of
one row and equal rewards. With a history, `gigpo` keeps a matrix of all pairs
of turns in memory, one byte per pair.
"""

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.rl import gae as gae_lib
from stppo_jax.rl import group_advantages
from stppo_jax.rl import masking
from stppo_jax.rl import options as options_lib
from stppo_jax.rl import segments as segments_lib

Array = jax.Array


@options_lib.dataclass
class TurnGroup(group_advantages.Group):
  """Options of `turn_group`.

  Attributes:
    turn_weight: weight of z(turn reward).
    epsilon: added to the standard deviation.
  """

  turn_weight: float = options_lib.number()
  epsilon: float = options_lib.number(above=0.0)


def turn_group(
  rewards_BL: Array,
  batch: batch_lib.TokenBatch,
  *,
  turn_weight: Array | float,
  epsilon: Array | float,
) -> Array:
  """Returns advantages from the outcome and from the turn rewards: MT-GRPO.

    A = z(outcome) + turn_weight z(turn reward)    before the row's last turn
    A = z(outcome)                                 in the row's last turn

  z(x) is (x - mean) / (std + epsilon) over the group, as in `group_normalized`.
  The outcome is the reward on the row's last policy token. The turn reward is
  the sum of all other rewards of the row, which stand on the last tokens of
  earlier turns. (A KL penalty inside the rewards would count as turn reward.)

  Source: arXiv 2505.11821. The authors' code has a single tool call: one turn,
  then the last turn. We make two choices. All turns before the last share
  z(turn reward). A row of one turn has z(outcome) only, while the authors' code
  normalises the sum of both rewards.
  """
  last_BL = masking.last_mask(batch.loss_mask_BL)
  outcome_B, pairs_BB = group_advantages.rows(
    masking.select(rewards_BL, last_BL), batch
  )
  turn_B, _ = group_advantages.rows(masking.select(rewards_BL, ~last_BL), batch)
  number_BL = gae_lib.turns_so_far(batch)
  early_BL = number_BL < jnp.max(number_BL, axis=1, keepdims=True)
  outcome_B = masking.standardized(outcome_B, pairs_BB, epsilon)
  turn_B = turn_weight * masking.standardized(turn_B, pairs_BB, epsilon)
  outcome_BL, turn_BL = (
    group_advantages.to_tokens(x_B, batch) for x_B in (outcome_B, turn_B)
  )
  return outcome_BL + masking.select(turn_BL, early_BL)


@options_lib.dataclass
class TurnLeaveOneOut(group_advantages.Group):
  """Options of `turn_leave_one_out`; gamma is the discount per turn."""

  gamma: float = options_lib.number(at_most=1.0)


def turn_leave_one_out(
  rewards_BL: Array,
  batch: batch_lib.TokenBatch,
  *,
  gamma: Array | float,
  num_turns: int,
) -> Array:
  """Returns each turn's reward-to-go minus the mean over the other rows.

    A_k = G_k - mean of G_k over the other rows of the group that have a turn k
    G_k = r_k + gamma G_{k+1}

  If no other row has a turn k, the baseline of turn k - 1 is used again. So
  every turn has a baseline b, which depends on the other rows only. Therefore
  the gradient is unbiased: E[b grad log pi(turn k)] =
  E[b] E[grad log pi(turn k)] = 0, also if the policy chooses in turn k whether
  there is a turn k + 1. `turn_group` has no turn baseline in a row's last turn,
  so it is biased in this case; docs/turn_baselines.md derives by how much.
  """
  rewards_BT, present_BT, _ = gae_lib.by_turn(rewards_BL, batch, num_turns)
  to_go_BT = gae_lib.rewards_to_go(rewards_BT, present_BT, gamma)
  _, pairs_BB = group_advantages.rows(rewards_BL, batch)
  others_BB = pairs_BB & ~jnp.eye(len(pairs_BB), dtype=bool)

  # The scan goes through the turns in order. If no other row has the turn, the
  # row keeps its baseline of the turn before.
  def following(carry, turn):
    baseline_B, known_B = carry
    to_go_B, present_B = turn
    total_B, count_B = masking.differences(to_go_B, others_BB & present_B[None])
    some_B = count_B > 0
    # The mean over the other rows is formed from the mean difference to these
    # rows, so that equal rewards have an advantage of exactly 0.
    baseline_B = jnp.where(
      some_B, to_go_B - masking.divide(total_B, count_B), baseline_B
    )
    known_B = known_B | some_B
    # A group of one row has no baseline, and its advantage is 0.
    return (baseline_B, known_B), masking.select(to_go_B - baseline_B, known_B)

  zero_B = jnp.zeros_like(to_go_BT[:, 0])
  _, advantages_TB = jax.lax.scan(
    following,
    (zero_B, jnp.zeros_like(present_BT[:, 0])),
    (to_go_BT.T, present_BT.T),
  )
  return gae_lib.turns_to_tokens(advantages_TB.T, batch)


@options_lib.dataclass
class TurnIndex(group_advantages.Group):
  """Options of `turn_index`."""

  turn_weight: float = options_lib.number()
  gamma: float = options_lib.number(at_most=1.0)
  epsilon: float = options_lib.number(above=0.0)


def turn_index(
  rewards_BL: Array,
  batch: batch_lib.TokenBatch,
  *,
  turn_weight: Array | float,
  gamma: Array | float,
  epsilon: Array | float,
  num_turns: int,
) -> Array:
  """Returns advantages that compare turns of equal index k: A2TGPO.

    A_k = z(outcome) + turn_weight D_k / sqrt(n_k)   before the row's last turn
    A_k = z(outcome)                                 in the row's last turn
    D_k = z(r_k) + gamma D_{k+1}

  n_k is the number of terms z in D_k. z normalises as in `group_normalized`:
  outcomes over the group, and r_k over the turns k of the group that are not
  the last turn of their row. Like `turn_group`, the estimator is biased if the
  policy chooses when to stop.

  Source: arXiv 2605.06200, whose turn reward is an information gain. The
  authors' code has gamma 1 and turn_weight 0.3, numbers only turns whose reward
  is not 0, and uses the population's standard deviation.

  Args:
    rewards_BL: the outcome, and the rewards of turns.
    batch: masks, turn ids and group ids.
    turn_weight: weight of the turn rewards.
    gamma: discount per turn.
    epsilon: added to the standard deviation.
    num_turns: static, the most turns a row can have.
  """
  last_BL = masking.last_mask(batch.loss_mask_BL)
  outcome_B, pairs_BB = group_advantages.rows(
    masking.select(rewards_BL, last_BL), batch
  )
  z_BT, after_BT = _turn_z(rewards_BL, batch, epsilon, num_turns)
  total_BT = masking.select(
    gae_lib.rewards_to_go(z_BT, after_BT > 0, gamma), after_BT > 0
  )
  scaled_BT = total_BT * jax.lax.rsqrt(jnp.maximum(after_BT, 1))
  outcome_B = masking.standardized(outcome_B, pairs_BB, epsilon)
  outcome_BL = group_advantages.to_tokens(outcome_B, batch)
  return outcome_BL + turn_weight * gae_lib.turns_to_tokens(scaled_BT, batch)


def turn_z(
  rewards_BL: Array, batch: batch_lib.TokenBatch, *, num_turns: int
) -> Array:
  """Returns z(r_k) of `turn_index` at each token, [B, L]; 0 in last turns."""
  z_BT, _ = _turn_z(rewards_BL, batch, _EPSILON, num_turns)
  return gae_lib.turns_to_tokens(z_BT, batch)


_EPSILON = 1e-6  # added to the standard deviation, as in A2TGPO


def _turn_z(rewards_BL, batch, epsilon, num_turns):
  """Returns z(r_k) and the number of later turns: [B, T], 0 in last turns."""
  rewards_BT, present_BT, _ = gae_lib.by_turn(rewards_BL, batch, num_turns)
  ones_BT = jnp.ones_like(rewards_BT)
  after_BT = gae_lib.rewards_to_go(ones_BT, present_BT, 1.0) - 1
  after_BT = masking.select(after_BT, present_BT)
  z_TB = jax.lax.map(
    lambda turn: masking.standardized(
      turn[0], masking.pairs_of(batch.group_ids_B, turn[1]), epsilon
    ),
    (rewards_BT.T, after_BT.T > 0),
  )
  return masking.select(z_TB.T, after_BT > 0), after_BT


# 'joint' normalises the rewards of last turns and of other turns together,
# 'separate' normalises them separately.
POOLS = ('joint', 'separate')


@options_lib.dataclass
class TurnPooled(group_advantages.Group):
  """Options of `turn_pooled`, whose docstring explains them."""

  pool: str = options_lib.one_of(POOLS)
  gamma: float = options_lib.number(at_most=1.0)
  epsilon: float = options_lib.number(above=0.0)


def turn_pooled(
  rewards_BL: Array,
  batch: batch_lib.TokenBatch,
  *,
  pool: str,
  gamma: Array | float,
  epsilon: Array | float,
  num_turns: int,
) -> Array:
  """Returns advantages that compare all rewards of a question: IGPO.

    A_k = z(r_k) + gamma A_{k+1}    over the turns with a reward

  The last turn of a row always has a reward, which includes the outcome. Other
  turns have a reward if it is not 0. z normalises as in `group_normalized`. A
  turn without a reward gets the advantage of the next turn with a reward. Rows
  have different numbers of rewards, so a sum of z favours some lengths, and the
  estimator is biased if the policy chooses when to stop.

  Source: arXiv 2510.14967, whose turn reward is an information gain, and the
  authors' code, which uses the population's standard deviation.

  Args:
    rewards_BL: the outcome, and the rewards of turns.
    batch: masks, turn ids and group ids.
    pool: z normalises all rewards together ('joint', as in the paper), or last
      turns and other turns separately ('separate', as in the authors' script).
    gamma: discount per turn with a reward.
    epsilon: added to the standard deviation.
    num_turns: static, the most turns a row can have.
  """
  rewards_BT, present_BT, _ = gae_lib.by_turn(rewards_BL, batch, num_turns)
  number_BT = gae_lib.rewards_to_go(jnp.ones_like(rewards_BT), present_BT, 1.0)
  is_last_BT = present_BT & (number_BT == 1)
  counted_BT = present_BT & (rewards_BT != 0) | is_last_BT
  group_ids = jnp.repeat(batch.group_ids_B, num_turns)
  pairs = masking.pairs_of(group_ids, counted_BT.reshape(-1))
  if pool == 'separate':
    is_last = is_last_BT.reshape(-1)
    pairs &= is_last[:, None] == is_last[None, :]
  z = masking.standardized(rewards_BT.reshape(-1), pairs, epsilon)
  to_go_BT = gae_lib.rewards_to_go(
    z.reshape(counted_BT.shape), counted_BT, gamma
  )
  # A group of one row gets 0, because there is no other row to compare with.
  _, pairs_BB = group_advantages.rows(rewards_BL, batch)
  has_others_B = jnp.sum(pairs_BB, axis=1) > 1
  return masking.select(
    gae_lib.turns_to_tokens(to_go_BT, batch), has_others_B[:, None]
  )


# How often an outcome counts in the mean and the deviation of its group.
OUTCOME_COUNTS = ('per_turn', 'per_trajectory')


@options_lib.dataclass
class Gigpo(group_advantages.Group):
  """Options of `gigpo`."""

  omega: float = options_lib.number()
  outcome_weight: float = options_lib.number()
  gamma: float = options_lib.number(at_most=1.0)
  history: int = options_lib.count()
  # Above 10, only the longest history would count, and float32 could overflow.
  power: float = options_lib.number(at_most=10.0)
  normalize: str = options_lib.one_of(masking.NORMALIZATIONS)
  outcome_counts: str = options_lib.one_of(OUTCOME_COUNTS)
  epsilon: float = options_lib.number(above=0.0)


def gigpo(
  rewards_BL: Array,
  batch: batch_lib.TokenBatch,
  *,
  omega: Array | float,
  outcome_weight: Array | float,
  gamma: Array | float,
  history: int,
  power: Array | float,
  normalize: str,
  outcome_counts: str,
  epsilon: Array | float,
  num_turns: int,
) -> Array:
  """Returns advantages of rows, and of turns that begin in one state: GiGPO.

    A = outcome_weight N(R) + omega sum_h w_h N_h(G) / sum_h w_h
    G_k = r_k + gamma G_{k+1},   w_h = (h + 2)^power

  N normalises as the argument `normalize` says. R, the reward of a row, is
  compared over the group. G, the reward-to-go of a turn, is compared over all
  turns of the question (also of the same row) that have the same state id, and
  the same state ids in their h preceding turns. The sums are over the h from 0
  to `history`, without any h at which N_h(G) is 0.

  Sources: arXiv 2505.10978, without a history; its code has omega 1, gamma 0.95
  and epsilon 1e-6. HGPO, arXiv 2602.22817, has a history of 2 or 4, power 1 and
  outcome_weight 0. HGPO uses the population's standard deviation of G and adds
  epsilon to the sum of the weights.

  Args:
    rewards_BL: the outcome, and the rewards of turns.
    batch: masks, turn ids, group ids, and state ids within a question.
    omega: weight of N(G).
    outcome_weight: weight of N(R).
    gamma: discount per turn.
    history: static, the most preceding states that are compared.
    power: the exponent of w_h; larger powers give longer histories more weight.
    normalize: 'std': N(x) = (x - mean) / (std + epsilon). 'none': x - mean.
    outcome_counts: R counts in the mean and the deviation of its group once for
      each turn of the trajectory ('per_turn', the default of the authors'
      code), or once ('per_trajectory', Eq. 3 of the paper).
    epsilon: added to the standard deviation.
    num_turns: static, the most turns a row can have.
  """
  assert batch.state_ids_BL is not None
  normalization = masking.NORMALIZATIONS[normalize]
  reward_B, pairs_BB = group_advantages.rows(rewards_BL, batch)
  rewards_BT, present_BT, turns = gae_lib.by_turn(rewards_BL, batch, num_turns)
  states_BL = masking.select(
    batch.state_ids_BL, segments_lib.segment_starts(turns)
  )
  # Only the first token of a turn is summed, so the sum is the turn's state id.
  states_BT = segments_lib.segment_totals(states_BL, turns)
  to_go = gae_lib.rewards_to_go(rewards_BT, present_BT, gamma).reshape(-1)
  present = present_BT.reshape(-1)
  group_ids = jnp.repeat(batch.group_ids_B, num_turns)
  # State ids start anew with every question, so equal ids mean the same state
  # within one question only.
  group_pairs = masking.pairs_of(group_ids, present)
  same = group_pairs & masking.pairs_of(states_BT.reshape(-1), present)

  def compare(carry, before):
    pairs, total, weights = carry
    # A pair of turns stays a pair if the turns before the two are a pair, too.
    shifted = pairs.reshape(*present_BT.shape, *present_BT.shape)
    shifted = shifted[:, :-1, :, :-1]
    shifted = jnp.pad(shifted, ((0, 0), (1, 0), (0, 0), (1, 0)))
    pairs = same & shifted.reshape(same.shape)
    advantage = normalization(to_go, pairs, epsilon)
    # All w_h are divided by w_0, so that the weight of N_0 is 1. If at this h a
    # turn is comparable with no other turn, its N_h is 0, and the weight of its
    # N_h must be 0, too.
    weight = masking.select((1 + before / 2) ** power, advantage != 0)
    return (pairs, total + weight * advantage, weights + weight), None

  steps = normalization(to_go, same, epsilon)
  if earlier := min(history, num_turns - 1):
    weights = (steps != 0).astype(steps.dtype)
    before = jnp.arange(1, earlier + 1, dtype=to_go.dtype)
    (_, total, weights), _ = jax.lax.scan(
      compare, (same, steps, weights), before
    )
    steps = masking.divide(total, weights)
  steps_BT = steps.reshape(present_BT.shape)
  if outcome_counts == 'per_turn':
    rewards = jnp.repeat(reward_B, num_turns)
    outcome = normalization(rewards, group_pairs, epsilon)
    # All present turns of a row have the same outcome advantage, so the row
    # takes it from its first present turn.
    some_B = jnp.argmax(present_BT, axis=1)
    outcome_B = jnp.take_along_axis(
      outcome.reshape(present_BT.shape), some_B[:, None], axis=1
    )[:, 0]
  else:
    outcome_B = normalization(reward_B, pairs_BB, epsilon)
  outcome_BL = outcome_weight * group_advantages.to_tokens(outcome_B, batch)
  return outcome_BL + omega * gae_lib.turns_to_tokens(steps_BT, batch)


ESTIMATORS = {
  'turn_group': options_lib.Choice(turn_group, TurnGroup),
  'turn_leave_one_out': options_lib.Choice(turn_leave_one_out, TurnLeaveOneOut),
  'turn_index': options_lib.Choice(turn_index, TurnIndex),
  'turn_pooled': options_lib.Choice(turn_pooled, TurnPooled),
  'gigpo': options_lib.Choice(gigpo, Gigpo),
}
