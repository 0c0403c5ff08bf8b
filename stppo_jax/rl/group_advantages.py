"""Advantages that compare the trajectories of one question; no value model.

B trajectories, L tokens, T turns, N things that are compared (trajectories,
or the turns of all of them). Rows of one question share `group_ids_B`. An
estimator is called `estimator(rewards_BL, batch, **options)`.

The reward of a row, R, is the sum of `rewards_BL` over its loss mask. A row
whose loss mask is false everywhere, and a turn without a token in it, is as
if it were absent. A mean is never formed: x_i - mean(x) is the mean of the
differences x_i - x_j, so that equal rewards give exactly 0, where a rounded
mean leaves 1e-8 that division by std + 1e-6 makes visible. A group of one
gives 0 (verl and verl-agent leave such a row its raw reward [code]; 0 is
[ours]).

Comparisons are matrices [N, N]: no scatter, no sorting, and on a mesh every
device compares its own rows with all. A compiler for accelerators fuses them
into their sums; on CPU they are held, 5 bytes a pair.

Every token of a row has an advantage, observations and padding too: whoever
whitens over observation tokens needs them. `advantages.estimate_advantages`
selects.
"""

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.rl import masking
from stppo_jax.rl import options as options_lib
from stppo_jax.rl import segments as segments_lib

Array = jax.Array


def _pairs(ids_N, present_N):
  """Whether i and j are of one group: [N, N]."""
  both_NN = present_N[:, None] & present_N[None, :]
  return both_NN & (ids_N[:, None] == ids_N[None, :])


def _differences(x_N, pairs_NN):
  """The sum over i's group of x_i - x_j, and the size of the group."""
  total_N = jnp.sum(
    masking.select(x_N[:, None] - x_N[None, :], pairs_NN), axis=1
  )
  return total_N, jnp.sum(pairs_NN, axis=1, dtype=x_N.dtype)


def _centered(x_N, pairs_NN, epsilon):
  del epsilon
  return masking.divide(*_differences(x_N, pairs_NN))


def _standardized(x_N, pairs_NN, epsilon):
  """(x - mean) / (std + epsilon), the variance divided by count - 1."""
  total_N, count_N = _differences(x_N, pairs_NN)
  centered_N = masking.divide(total_N, count_N)
  squares_N = jnp.sum(
    masking.select(
      jnp.broadcast_to(jnp.square(centered_N)[None, :], pairs_NN.shape),
      pairs_NN,
    ),
    axis=1,
  )
  variance_N = masking.divide(squares_N, jnp.maximum(count_N - 1, 0))
  # The root of 0 has no slope: it is taken of 1 and dropped.
  some_N = variance_N > 0
  std_N = masking.select(jnp.sqrt(jnp.where(some_N, variance_N, 1)), some_N)
  return masking.divide(centered_N, std_N + epsilon)


# What the difference from the group's mean is divided by.
NORMALIZATIONS = {'std': _standardized, 'none': _centered}


def _rows(x_BL, batch):
  """The sum of x over each row's loss mask, and which rows may be compared."""
  mask_BL = batch.loss_mask_BL
  total_B, _ = masking.masked_total(x_BL, mask_BL, axis=1)
  return total_B, _pairs(batch.group_ids_B, jnp.any(mask_BL, axis=1))


def _to_tokens(x_B, batch):
  return jnp.broadcast_to(x_B[:, None], batch.loss_mask_BL.shape)


@options_lib.dataclass
class GroupNormalized(options_lib.Named):
  """Options of `group_normalized`."""

  epsilon: float = options_lib.number(above=0.0)
  whiten: str = options_lib.one_of(masking.WHITENS)


def group_normalized(
  rewards_BL: Array,
  batch: batch_lib.TokenBatch,
  *,
  epsilon: Array | float,
) -> Array:
  """(R - mean) / (std + epsilon) over the group: GRPO, arXiv 2402.03300.

  The standard deviation is the unbiased one, as torch.std in verl and TRL
  [code]; epsilon is 1e-6 in verl, 1e-4 in TRL.
  """
  reward_B, pairs_BB = _rows(rewards_BL, batch)
  return _to_tokens(_standardized(reward_B, pairs_BB, epsilon), batch)


@options_lib.dataclass
class Group(options_lib.Named):
  """Options of `group_centered` and of `leave_one_out`."""

  whiten: str = options_lib.one_of(masking.WHITENS)


def group_centered(rewards_BL: Array, batch: batch_lib.TokenBatch) -> Array:
  """R - mean over the group: Dr. GRPO, arXiv 2503.20783; MiniRL."""
  total_B, count_B = _differences(*_rows(rewards_BL, batch))
  return _to_tokens(masking.divide(total_B, count_B), batch)


def leave_one_out(rewards_BL: Array, batch: batch_lib.TokenBatch) -> Array:
  """R - mean of the group's others: RLOO, arXiv 2402.14740.

  With G rows in the group, G / (G - 1) times `group_centered`.
  """
  total_B, count_B = _differences(*_rows(rewards_BL, batch))
  others_B = jnp.maximum(count_B - 1, 0)
  return _to_tokens(masking.divide(total_B, others_B), batch)


def _turns_so_far(batch):
  """Each token's turn; an observation is of the turn before it; 0 at first."""
  ids_BL = jnp.where(batch.loss_mask_BL, batch.turn_ids_BL, 0)
  return jax.lax.cummax(ids_BL, axis=1)


@options_lib.dataclass
class TurnGroup(options_lib.Named):
  """Options of `turn_group`."""

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
  """MT-GRPO: a reward for the outcome and one for the turns before the last.

    A = z(outcome) + turn_weight z(turn reward) [before the row's last turn]

  with z as in `group_normalized`, the outcome the reward on the row's last
  policy token, and the turn reward the sum of all its others: they stand on
  the last tokens of earlier turns. (A KL penalty inside the rewards would
  count as turn reward.)

  Source: arXiv 2505.11821, whose code has a single tool call, so one turn and
  a last one [code]. That all turns before the last share the turn's part is
  [ours], and so is a row of one turn, which has the outcome's part only (the
  code normalises the sum of both rewards for it).
  """
  mask_BL = batch.loss_mask_BL
  count_BL = jnp.cumsum(mask_BL.astype(jnp.int32), axis=1)
  last_BL = mask_BL & (count_BL == jnp.max(count_BL, axis=1, keepdims=True))
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


def _to_go(rewards_BT, present_BT, gamma):
  """Discounted reward-to-go of each turn; an absent turn takes no time."""

  def previous(to_go_B, turn):
    reward_B, present_B = turn
    to_go_B = jnp.where(present_B, reward_B + gamma * to_go_B, to_go_B)
    return to_go_B, to_go_B

  zero_B = jnp.zeros_like(rewards_BT, shape=rewards_BT.shape[:1])
  _, to_go_TB = jax.lax.scan(
    previous, zero_B, (rewards_BT.T, present_BT.T), reverse=True
  )
  return to_go_TB.T


@options_lib.dataclass
class Gigpo(options_lib.Named):
  """Options of `gigpo`."""

  omega: float = options_lib.number()
  gamma: float = options_lib.number(at_most=1.0)
  normalize: str = options_lib.one_of(NORMALIZATIONS)
  epsilon: float = options_lib.number(above=0.0)
  whiten: str = options_lib.one_of(masking.WHITENS)


def gigpo(
  rewards_BL: Array,
  batch: batch_lib.TokenBatch,
  *,
  omega: Array | float,
  gamma: Array | float,
  normalize: str,
  epsilon: Array | float,
  num_turns: int,
) -> Array:
  """GiGPO: rows of one question, and turns begun in one state, are compared.

    A = N(R) + omega N(G),   G_k = r_k + gamma G_{k+1}

  R is compared over the group; G, the reward-to-go of a turn, over all turns
  of the batch that share a state id, those of one row included [code].

  Source: arXiv 2505.10978; omega 1, gamma 0.95 and epsilon 1e-6 [code].

  Args:
    rewards_BL: the outcome, and rewards of turns where there are some.
    batch: masks, turn ids, group ids, and state ids within a question.
    omega: weight of the step's part.
    gamma: discount per turn.
    normalize: 'std': N(x) = (x - mean) / (std + epsilon). 'none': x - mean.
    epsilon: added to the standard deviation.
    num_turns: static, the most turns a row can have.

  Raises:
    ValueError: the batch has no state ids.
  """
  if batch.state_ids_BL is None:
    raise ValueError('the estimator gigpo needs state_ids_BL')
  normalization = NORMALIZATIONS[normalize]
  reward_B, pairs_BB = _rows(rewards_BL, batch)

  turns = segments_lib.level_segments('turn', batch, num_turns=num_turns)
  starts_BL = segments_lib.segment_starts(turns)
  total = lambda x_BL: segments_lib.segment_totals(x_BL, turns)
  rewards_BT = total(rewards_BL)  # of the turns: no other token is in one
  present_BT = total(starts_BL.astype(jnp.int32)) > 0
  states_BT = total(masking.select(batch.state_ids_BL, starts_BL))

  to_go_BT = _to_go(rewards_BT, present_BT, gamma)
  present_N = present_BT.reshape(-1)
  groups_N = jnp.repeat(batch.group_ids_B, num_turns)
  # States of two questions are never one state, whatever their numbers.
  pairs_NN = _pairs(states_BT.reshape(-1), present_N)
  pairs_NN &= _pairs(groups_N, present_N)
  step_N = normalization(to_go_BT.reshape(-1), pairs_NN, epsilon)
  step_BL = segments_lib.segment_spread(
    step_N.reshape(to_go_BT.shape),
    segments_lib.Segments(_turns_so_far(batch), num_turns),
  )
  outcome_B = normalization(reward_B, pairs_BB, epsilon)
  return _to_tokens(outcome_B, batch) + omega * step_BL
