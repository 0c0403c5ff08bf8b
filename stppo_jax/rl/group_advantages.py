"""Advantages that compare the trajectories of one question; no value model.

B trajectories, L tokens, T turns. Rows of one question share `group_ids_B`. An
estimator is called `estimator(rewards_BL, batch, **options)` and returns
advantages [B, L].

The reward of a row, R, is the sum of `rewards_BL` over its loss mask. Rows
whose loss mask is false everywhere, and turns without a token in it, count as
absent. No mean is formed: x_i - mean(x) is computed as the mean of the
differences x_i - x_j, so that equal rewards give exactly 0. A rounded mean
would leave 1e-8, which the division by std + 1e-6 would make visible. A group
of one row gives 0, which is our choice: verl and verl-agent leave such a row
its raw reward.

What is compared is one number per trajectory, or one per turn of all
trajectories; these vectors, and the square matrices of their pairs, have no
suffix where they may be either. With matrices there is no scatter and no
sorting, and on a mesh every device compares its own rows with all rows. A
compiler for accelerators fuses the matrices into their sums; on CPU they take 5
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
from stppo_jax.rl import segments as segments_lib

Array = jax.Array


def _pairs(ids, present):
  """Returns a square mask of the pairs (i, j) that are present in one group."""
  both = present[:, None] & present[None, :]
  return both & (ids[:, None] == ids[None, :])


def _differences(x, pairs):
  """Returns the sum of x_i - x_j over i's group, and the group's size."""
  total = jnp.sum(masking.select(x[:, None] - x[None, :], pairs), axis=1)
  return total, jnp.sum(pairs, axis=1, dtype=x.dtype)


def _centered(x, pairs, epsilon):
  del epsilon
  return masking.divide(*_differences(x, pairs))


def _standardized(x, pairs, epsilon):
  """Returns (x - mean) / (std + epsilon), with the unbiased variance."""
  total, count = _differences(x, pairs)
  centered = masking.divide(total, count)
  squares = jnp.sum(
    masking.select(
      jnp.broadcast_to(jnp.square(centered)[None, :], pairs.shape),
      pairs,
    ),
    axis=1,
  )
  variance = masking.divide(squares, jnp.maximum(count - 1, 0))
  # The square root has an infinite slope at 0. So where the variance is 0, the
  # root of 1 is computed instead and then replaced by 0.
  some = variance > 0
  std = masking.select(jnp.sqrt(jnp.where(some, variance, 1)), some)
  return masking.divide(centered, std + epsilon)


# The difference from the group's mean is divided by std + epsilon, or not.
NORMALIZATIONS = {'std': _standardized, 'none': _centered}


def _rows(x_BL, batch):
  """Returns the sum of x over each row's loss mask, and a mask of pairs.

  The mask [B, B] is true for two rows of one question.
  """
  mask_BL = batch.loss_mask_BL
  total_B, _ = masking.masked_total(x_BL, mask_BL, axis=1)
  return total_B, _pairs(batch.group_ids_B, jnp.any(mask_BL, axis=1))


def _to_tokens(x_B, batch):
  return jnp.broadcast_to(x_B[:, None], batch.loss_mask_BL.shape)


@options_lib.dataclass
class GroupNormalized(options_lib.Named):
  """Options of `group_normalized`.

  Attributes:
    epsilon: added to the standard deviation.
    whiten: see `advantages.estimate_advantages`.
  """

  epsilon: float = options_lib.number(above=0.0)
  whiten: str = options_lib.one_of(masking.WHITENS)


def group_normalized(
  rewards_BL: Array,
  batch: batch_lib.TokenBatch,
  *,
  epsilon: Array | float,
) -> Array:
  """Returns (R - mean) / (std + epsilon) over the group: GRPO.

  The standard deviation is the unbiased one, as that of torch.std, which verl
  and TRL use; epsilon is 1e-6 in verl and 1e-4 in TRL. Source: arXiv
  2402.03300.
  """
  reward_B, pairs_BB = _rows(rewards_BL, batch)
  return _to_tokens(_standardized(reward_B, pairs_BB, epsilon), batch)


@options_lib.dataclass
class Group(options_lib.Named):
  """Options of `group_centered` and of `leave_one_out`."""

  whiten: str = options_lib.one_of(masking.WHITENS)


def group_centered(rewards_BL: Array, batch: batch_lib.TokenBatch) -> Array:
  """Returns R - mean over the group: Dr. GRPO and MiniRL.

  Sources: arXiv 2503.20783, arXiv 2512.01374.
  """
  total_B, count_B = _differences(*_rows(rewards_BL, batch))
  return _to_tokens(masking.divide(total_B, count_B), batch)


def leave_one_out(rewards_BL: Array, batch: batch_lib.TokenBatch) -> Array:
  """Returns R - mean over the other rows of the group: RLOO.

  With G rows in the group this is G / (G - 1) times `group_centered`. Source:
  arXiv 2402.14740.
  """
  total_B, count_B = _differences(*_rows(rewards_BL, batch))
  others_B = jnp.maximum(count_B - 1, 0)
  return _to_tokens(masking.divide(total_B, others_B), batch)


def _turns_so_far(batch):
  """Returns the latest turn at or before each token; 0 before the first."""
  ids_BL = jnp.where(batch.loss_mask_BL, batch.turn_ids_BL, 0)
  return jax.lax.cummax(ids_BL, axis=1)


@options_lib.dataclass
class TurnGroup(options_lib.Named):
  """Options of `turn_group`.

  Attributes:
    turn_weight: weight of z(turn reward).
    epsilon: added to the standard deviation.
    whiten: see `advantages.estimate_advantages`.
  """

  turn_weight: float = options_lib.number()
  epsilon: float = options_lib.number(above=0.0)
  whiten: str = options_lib.one_of(masking.WHITENS)


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
  then the last one. Two things are our choice: all turns before the last share
  z(turn reward), and a row of one turn has z(outcome) only, where the authors'
  code normalises the sum of both rewards.
  """
  last_BL = masking.last_mask(batch.loss_mask_BL)
  outcome_B, pairs_BB = _rows(masking.select(rewards_BL, last_BL), batch)
  turn_B, _ = _rows(masking.select(rewards_BL, ~last_BL), batch)
  turn_BL = _turns_so_far(batch)
  early_BL = turn_BL < jnp.max(turn_BL, axis=1, keepdims=True)
  return _to_tokens(
    _standardized(outcome_B, pairs_BB, epsilon), batch
  ) + masking.select(
    _to_tokens(turn_weight * _standardized(turn_B, pairs_BB, epsilon), batch),
    early_BL,
  )


def _by_turn(rewards_BL, batch, gamma, num_turns):
  """Returns rewards-to-go [B, T], which turns exist, and segments of turns.

  An absent turn has the reward-to-go of the next one, without a discount.
  """
  turns = segments_lib.level_segments('turn', batch, num_turns=num_turns)
  starts_BL = segments_lib.segment_starts(turns)
  # Tokens in no turn do not count.
  rewards_BT = segments_lib.segment_totals(rewards_BL, turns)
  present_BT = segments_lib.segment_totals(starts_BL.astype(jnp.int32), turns)
  present_BT = present_BT > 0

  def previous(to_go_B, turn):
    reward_B, present_B = turn
    to_go_B = jnp.where(present_B, reward_B + gamma * to_go_B, to_go_B)
    return to_go_B, to_go_B

  zero_B = jnp.zeros_like(rewards_BT, shape=rewards_BT.shape[:1])
  _, to_go_TB = jax.lax.scan(
    previous, zero_B, (rewards_BT.T, present_BT.T), reverse=True
  )
  return to_go_TB.T, present_BT, turns


def _turns_to_tokens(x_BT, batch):
  """Returns for every token the number of the latest turn at or before it."""
  segments = segments_lib.Segments(_turns_so_far(batch), x_BT.shape[1])
  return segments_lib.segment_spread(x_BT, segments)


@options_lib.dataclass
class TurnLeaveOneOut(options_lib.Named):
  """Options of `turn_leave_one_out`.

  Attributes:
    gamma: discount per turn.
    whiten: see `advantages.estimate_advantages`.
  """

  gamma: float = options_lib.number(at_most=1.0)
  whiten: str = options_lib.one_of(masking.WHITENS)


def turn_leave_one_out(
  rewards_BL: Array,
  batch: batch_lib.TokenBatch,
  *,
  gamma: Array | float,
  num_turns: int,
) -> Array:
  """Returns the reward-to-go of each turn, minus that of other rows there.

    A_k = G_k - mean of G_k over the other rows of the group that have a turn k
    G_k = r_k + gamma G_{k+1}

  Where no other row has a turn k, the mean is that of the latest turn that
  another row has. So the baseline of a row depends on the other rows only, and
  is subtracted in every turn of the row. Both together make it unbiased:
  E[b grad log pi(turn k)] = E[b] E[grad log pi(turn k)] = 0, also where the
  policy chooses in turn k whether there is a turn k + 1. `turn_group`, whose
  baseline is left out in the last turn of a row, is biased there;
  docs/turn_baselines.md derives by how much.

  Args:
    rewards_BL: the outcome, and the rewards of turns.
    batch: masks, turn ids and group ids.
    gamma: discount per turn.
    num_turns: static, the most turns a row can have.
  """
  to_go_BT, present_BT, _ = _by_turn(rewards_BL, batch, gamma, num_turns)
  _, pairs_BB = _rows(rewards_BL, batch)
  others_BB = pairs_BB & ~jnp.eye(len(pairs_BB), dtype=bool)

  def following(carry, turn):
    baseline_B, known_B = carry
    to_go_B, present_B = turn
    total_B, count_B = _differences(to_go_B, others_BB & present_B[None])
    some_B = count_B > 0
    baseline_B = jnp.where(
      some_B, to_go_B - masking.divide(total_B, count_B), baseline_B
    )
    known_B = known_B | some_B
    # A group of one has no baseline, and advantage 0.
    return (baseline_B, known_B), masking.select(to_go_B - baseline_B, known_B)

  zero_B = jnp.zeros_like(to_go_BT[:, 0])
  _, advantages_TB = jax.lax.scan(
    following,
    (zero_B, jnp.zeros_like(present_BT[:, 0])),
    (to_go_BT.T, present_BT.T),
  )
  return _turns_to_tokens(advantages_TB.T, batch)


# The outcome of a trajectory counts once per turn, or once, in the mean and the
# standard deviation of its group.
OUTCOME_COUNTS = ('per_turn', 'per_trajectory')


@options_lib.dataclass
class Gigpo(options_lib.Named):
  """Options of `gigpo`; see `advantages.estimate_advantages` for `whiten`."""

  omega: float = options_lib.number()
  gamma: float = options_lib.number(at_most=1.0)
  normalize: str = options_lib.one_of(NORMALIZATIONS)
  outcome_counts: str = options_lib.one_of(OUTCOME_COUNTS)
  epsilon: float = options_lib.number(above=0.0)
  whiten: str = options_lib.one_of(masking.WHITENS)


def gigpo(
  rewards_BL: Array,
  batch: batch_lib.TokenBatch,
  *,
  omega: Array | float,
  gamma: Array | float,
  normalize: str,
  outcome_counts: str,
  epsilon: Array | float,
  num_turns: int,
) -> Array:
  """Returns advantages of rows, and of turns that begin in one state: GiGPO.

    A = N(R) + omega N(G),   G_k = r_k + gamma G_{k+1}

  N normalises as the argument `normalize` says. R is compared over the group.
  G, the reward-to-go of a turn, is compared over all turns of the question that
  share a state id, also within one row, as in the authors' code.

  Source: arXiv 2505.10978. The authors' code has omega 1, gamma 0.95 and
  epsilon 1e-6.

  Args:
    rewards_BL: the outcome, and the rewards of turns.
    batch: masks, turn ids, group ids, and state ids within a question.
    omega: weight of N(G).
    gamma: discount per turn.
    normalize: 'std': N(x) = (x - mean) / (std + epsilon). 'none': x - mean.
    outcome_counts: R counts in the mean and the deviation of its group once for
      each turn of the trajectory ('per_turn', the default of the authors'
      code), or once ('per_trajectory', Eq. 3 of the paper).
    epsilon: added to the standard deviation.
    num_turns: static, the most turns a row can have.

  Raises:
    ValueError: the batch has no state ids.
  """
  if batch.state_ids_BL is None:
    raise ValueError('the estimator gigpo needs state_ids_BL')
  normalization = NORMALIZATIONS[normalize]
  reward_B, pairs_BB = _rows(rewards_BL, batch)
  to_go_BT, present_BT, turns = _by_turn(rewards_BL, batch, gamma, num_turns)
  states_BL = masking.select(
    batch.state_ids_BL, segments_lib.segment_starts(turns)
  )
  states_BT = segments_lib.segment_totals(states_BL, turns)
  present = present_BT.reshape(-1)
  group_ids = jnp.repeat(batch.group_ids_B, num_turns)
  # State ids start anew with every question, so that equal ids mean the same
  # state within one question only.
  group_pairs = _pairs(group_ids, present)
  pairs = group_pairs & _pairs(states_BT.reshape(-1), present)
  step = normalization(to_go_BT.reshape(-1), pairs, epsilon)
  step_BL = _turns_to_tokens(step.reshape(to_go_BT.shape), batch)
  if outcome_counts == 'per_turn':
    rewards = jnp.repeat(reward_B, num_turns)
    outcome = normalization(rewards, group_pairs, epsilon)
    # All present turns of a row have the same outcome advantage, so that of the
    # first one is the row's.
    some_B = jnp.argmax(present_BT, axis=1)
    outcome_B = jnp.take_along_axis(
      outcome.reshape(present_BT.shape), some_B[:, None], axis=1
    )[:, 0]
  else:
    outcome_B = normalization(reward_B, pairs_BB, epsilon)
  return _to_tokens(outcome_B, batch) + omega * step_BL
