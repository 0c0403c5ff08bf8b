"""Slow float64 references of the advantage estimators, row by row."""

import math

import numpy as np

from tests.rl import twins


def turns_by_id(batch, b):
  """Returns the trained tokens of each turn of a row by its id, in order."""
  mask, ids = batch.loss_mask_BL[b], batch.turn_ids_BL[b]
  return {k: np.flatnonzero(mask & (ids == k)) for k in np.unique(ids[mask])}


def turns_of(batch, b):
  """Returns the trained tokens of each turn of a row, in order."""
  return list(turns_by_id(batch, b).values())


def _at_tokens(batch, numbers):
  """Returns for each token the number of its row, or of its (row, turn id)."""
  out = np.zeros(batch.loss_mask_BL.shape)
  for b in present_rows(batch):
    for k, turn in turns_by_id(batch, b).items():
      out[b, turn] = numbers.get((b, k), numbers.get(b, 0.0))
  return out


def over_tokens(batch, steps, gamma, lambda_):
  """Returns GAE over the steps of each row, a mask of tokens; 0 elsewhere."""
  rewards = np.where(batch.loss_mask_BL, batch.rewards_BL, 0)
  out = np.zeros(steps.shape)
  for b, row in enumerate(steps):
    values = batch.values_BL[b, row]
    out[b, row] = twins.gae(rewards[b, row], values, gamma, lambda_)
  return out


def bilevel(
  batch, rewards, gamma, lambda_, gamma_turn, lambda_turn, turn_value=0
):
  """Returns (advantages, returns) of GAE in each turn, after GAE over turns.

  `turn_value` is the token of a turn at which its value is read.
  """
  advantages, returns = np.zeros((2, *batch.loss_mask_BL.shape))
  for b in range(len(rewards)):
    turns = turns_of(batch, b)
    turn_values = [batch.values_BL[b, turn[turn_value]] for turn in turns]
    turn_rewards = [rewards[b, turn].sum() for turn in turns]
    found = twins.gae(turn_rewards, turn_values, gamma_turn, lambda_turn)
    for turn, own_value, advantage in zip(
      turns, turn_values, found, strict=True
    ):
      alone = [0.0] * (len(turn) - 1) + [advantage + own_value]
      values = list(batch.values_BL[b, turn])
      advantages[b, turn] = twins.gae(alone, values, gamma, lambda_)
      returns[b, turn] = advantages[b, turn] + values
  return advantages, returns


def response(mask):
  """Returns a mask from each row's first policy token to its last."""
  out = np.zeros_like(mask)
  for b, row in enumerate(mask):
    if row.any():
      first, last = np.flatnonzero(row)[[0, -1]]
      out[b, first : last + 1] = True
  return out


def repeated(x, mask):
  """Returns x, at observation tokens repeated from the token before."""
  out = x.copy()
  for b, i in np.argwhere(response(mask) & ~mask):
    out[b, i] = out[b, i - 1]
  return out


def compare(values, epsilon):
  """Returns (x - mean) / (std + epsilon) of each; epsilon None: x - mean."""
  if len(values) == 1:
    return [0.0]
  mean = sum(values) / len(values)
  centered = [value - mean for value in values]
  if epsilon is None:
    return centered
  variance = sum(c * c for c in centered) / (len(values) - 1)
  return [c / (math.sqrt(variance) + epsilon) for c in centered]


def compare_in_groups(values, groups, epsilon):
  """Returns `compare` within each group; both arguments are dicts by key."""
  out = {}
  for group in set(groups.values()):
    keys = [key for key in values if groups[key] == group]
    compared = compare([values[key] for key in keys], epsilon)
    out |= dict(zip(keys, compared, strict=True))
  return out


def present_rows(batch):
  return [b for b in range(len(batch.loss_mask_BL)) if turns_of(batch, b)]


def compare_rows(batch, reward_of, epsilon):
  rows = present_rows(batch)
  return compare_in_groups(
    {b: reward_of(b) for b in rows},
    {b: batch.group_ids_B[b] for b in rows},
    epsilon,
  )


def total(batch, b):
  return batch.rewards_BL[b, batch.loss_mask_BL[b]].sum()


def over_rows(batch, epsilon):
  """Returns `group_normalized`, or `group_centered` with epsilon None."""
  found = compare_rows(batch, lambda b: total(batch, b), epsilon)
  return _at_tokens(batch, found)


def leave_one_out(batch):
  found = {}
  rows = present_rows(batch)
  for b in rows:
    others = [
      total(batch, other)
      for other in rows
      if other != b and batch.group_ids_B[other] == batch.group_ids_B[b]
    ]
    if others:
      found[b] = total(batch, b) - sum(others) / len(others)
  return _at_tokens(batch, found)


def _outcomes(batch):
  """Returns the reward of the last token of each row."""
  return {
    b: batch.rewards_BL[b, turns_of(batch, b)[-1][-1]]
    for b in present_rows(batch)
  }


def turn_group(batch, turn_weight, epsilon):
  last = _outcomes(batch)
  found = outcome = compare_rows(batch, lambda b: last[b], epsilon)
  early = compare_rows(batch, lambda b: total(batch, b) - last[b], epsilon)
  for b in last:
    for k in [*turns_by_id(batch, b)][:-1]:
      found = found | {(b, k): outcome[b] + turn_weight * early[b]}
  return _at_tokens(batch, found)


def to_go_by_turn(batch, b, gamma):
  """Returns the reward-to-go of each turn of a row, by the turn's id."""
  out, to_go = {}, 0.0
  for k, turn in reversed(turns_by_id(batch, b).items()):
    out[k] = to_go = batch.rewards_BL[b, turn].sum() + gamma * to_go
  return out


def turn_leave_one_out(batch, gamma):
  found = {}
  to_go = {b: to_go_by_turn(batch, b, gamma) for b in present_rows(batch)}
  for b, own in to_go.items():
    others = [
      x
      for other, x in to_go.items()
      if other != b and batch.group_ids_B[other] == batch.group_ids_B[b]
    ]
    for k in own:
      reached = max((j for x in others for j in x if j <= k), default=None)
      if reached is not None:
        there = [x[reached] for x in others if reached in x]
        found[b, k] = own[k] - sum(there) / len(there)
  return _at_tokens(batch, found)


def _over_turns(batch, epsilon):
  """Returns `over_rows` with each outcome once for every turn of its row."""
  turns = [(b, k) for b in present_rows(batch) for k in turns_by_id(batch, b)]
  found = compare_in_groups(
    {(b, k): total(batch, b) for b, k in turns},
    {(b, k): batch.group_ids_B[b] for b, k in turns},
    epsilon,
  )
  return _at_tokens(batch, found)


def turn_z(batch, epsilon):
  """Returns z of the turns before the last by row and number."""
  rewards, places = {}, {}
  for b in present_rows(batch):
    for k, turn in [*turns_by_id(batch, b).items()][:-1]:
      rewards[b, k] = batch.rewards_BL[b, turn].sum()
      places[b, k] = batch.group_ids_B[b], k
  return compare_in_groups(rewards, places, epsilon)


def turn_index(batch, turn_weight, gamma, epsilon):
  last = _outcomes(batch)
  found = outcome = compare_rows(batch, lambda b: last[b], epsilon)
  z = turn_z(batch, epsilon)
  for b in last:
    mine = sorted(k for row, k in z if row == b)
    for i, k in enumerate(mine):
      later = [gamma**n * z[b, j] for n, j in enumerate(mine[i:])]
      step = turn_weight * sum(later) / math.sqrt(len(later))
      found = found | {(b, k): outcome[b] + step}
  return _at_tokens(batch, found)


def turn_pooled(batch, gamma, epsilon, separate=False):
  rewards, groups = {}, {}
  for b in present_rows(batch):
    turns = turns_by_id(batch, b)
    for k, turn in turns.items():
      reward = batch.rewards_BL[b, turn].sum()
      is_last = k == max(turns)
      if reward != 0 or is_last:
        rewards[b, k] = reward
        groups[b, k] = batch.group_ids_B[b], separate and is_last
  z = compare_in_groups(rewards, groups, epsilon)
  found = {}
  ids = [batch.group_ids_B[b] for b in present_rows(batch)]
  for b in present_rows(batch):
    if ids.count(batch.group_ids_B[b]) == 1:
      continue
    advantage = 0.0
    for k in reversed(turns_by_id(batch, b)):
      if (b, k) in z:
        advantage = z[b, k] + gamma * advantage
      found[b, k] = advantage
  return _at_tokens(batch, found)


def gigpo(
  batch,
  omega,
  gamma,
  epsilon,
  per_turn=True,
  history=0,
  power=1.0,
  outcome_weight=1.0,
):
  returns, states = {}, {}
  for b in present_rows(batch):
    to_go = to_go_by_turn(batch, b, gamma)
    for k, turn in turns_by_id(batch, b).items():
      returns[b, k] = to_go[k]
      # Equal ids mean the same state within one question only.
      states[b, k] = batch.group_ids_B[b], batch.state_ids_BL[b, turn[0]]
  outcome = (_over_turns if per_turn else over_rows)(batch, epsilon)
  total, weights = dict.fromkeys(returns, 0.0), dict.fromkeys(returns, 0.0)
  for h in range(history + 1):
    pasts = {
      (b, k): tuple(states[b, k - i] for i in range(h + 1))
      for b, k in returns
      if all((b, k - i) in states for i in range(h + 1))
    }
    compared = compare_in_groups(
      {key: returns[key] for key in pasts}, pasts, epsilon
    )
    for key, step in compared.items():
      if step:
        total[key] += (h + 2) ** power * step
        weights[key] += (h + 2) ** power
  steps = {key: total[key] / weights[key] for key in total if weights[key]}
  return outcome_weight * outcome + omega * _at_tokens(batch, steps)
