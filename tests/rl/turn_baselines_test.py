"""Expected updates of group estimators, enumerated, against the true gradient.

The policy of a small problem chooses in each turn whether to search or to stop,
and how good a search is. Every group of three trajectories is a question of one
batch, so that the expectation of an update is a finite sum. One number of the
batch is a turn. docs/turn_baselines.md has the derivation.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import numpy as np
import pytest

from stppo_jax import batch as batch_lib
from stppo_jax.configs import defaults
from stppo_jax.rl import advantages

G = 3
T = 3
# The probability that a first turn searches, that its query is good, and that a
# second turn searches again.
P = np.array([0.7, 0.4, 0.25])
FIRST, QUALITY, SECOND = range(3)


class Trajectory(NamedTuple):
  """The choices of every turn, as (parameter, whether it was made)."""

  choices: tuple[tuple[tuple[int, bool], ...], ...]
  rewards: tuple[float, ...]


def _trajectories():
  stop, search = ((FIRST, False),), (FIRST, True)
  yield Trajectory((stop,), (0.9,))
  for good, reward, outcome in ((True, 1.0, 0.9), (False, 0.1, 0.3)):
    first = (search, (QUALITY, good))
    rewards = (reward, outcome)
    yield Trajectory((first, ((SECOND, False),)), rewards)
    rewards = (reward, 0.6, outcome - 0.2)
    yield Trajectory((first, ((SECOND, True),), ()), rewards)


TRAJECTORIES = tuple(_trajectories())
# The simplest case: a good search is worth 1, and stopping as much as a search.
SIMPLE = (
  Trajectory((((FIRST, False),),), (P[QUALITY],)),
  *(
    Trajectory((((FIRST, True), (QUALITY, good)), ()), (float(good), 0.0))
    for good in (True, False)
  ),
)


def _probability(trajectory):
  chosen = itertools.chain(*trajectory.choices)
  return np.prod([P[i] if made else 1 - P[i] for i, made in chosen])


def _scores(trajectory):
  """Returns the gradient of log pi by the logits, for each turn: [T, 3]."""
  out = np.zeros((T, len(P)))
  for k, turn in enumerate(trajectory.choices):
    for i, made in turn:
      out[k, i] = made - P[i]
  return out


def _true_gradient(trajectories):
  return sum(
    _probability(x) * sum(x.rewards) * _scores(x).sum(0) for x in trajectories
  )


@functools.cache
def _moments(trajectories, name, **options):
  """Returns the expected update of a group, and its expected square."""
  groups = list(itertools.product(trajectories, repeat=G))
  rows = [x for group in groups for x in group]
  zeros = np.zeros((len(rows), T))
  turn_ids, rewards = zeros.astype(np.int32), zeros.copy()
  for b, x in enumerate(rows):
    turn_ids[b, : len(x.choices)] = np.arange(len(x.choices)) + 1
    rewards[b, : len(x.rewards)] = x.rewards
  batch = batch_lib.TokenBatch(
    tokens_BL=zeros.astype(np.int32),
    lengths_B=np.full(len(rows), T, np.int32),
    turn_ids_BL=turn_ids,
    loss_mask_BL=turn_ids > 0,
    sampler_logprobs_BL=zeros,
    rewards_BL=rewards,
    group_ids_B=np.repeat(np.arange(len(groups), dtype=np.int32), G),
  )
  chosen = defaults.choice('advantage', name, **options)
  estimate = jax.jit(
    lambda batch: advantages.estimate_advantages(
      batch.rewards_BL, batch, num_turns=T, **chosen
    )
  )(batch)
  by_row = np.einsum(
    'bt,bti->bi', estimate.advantages_BL, [_scores(x) for x in rows]
  )
  updates = by_row.reshape(-1, G, len(P)).mean(1)
  probabilities = [np.prod([_probability(x) for x in g]) for g in groups]
  return probabilities @ updates, probabilities @ (updates**2).sum(1)


def _expected(trajectories, name, **options):
  return _moments(trajectories, name, **options)[0]


def _expected_turn_group(trajectories):
  """Returns the expected update of `turn_group` with z(x) = x - mean.

  With an epsilon so large, the deviation in z does not count.
  """
  epsilon = 1e8
  return epsilon * _expected(trajectories, 'turn_group', epsilon=epsilon)


@pytest.mark.parametrize('trajectories', [SIMPLE, TRAJECTORIES])
@pytest.mark.parametrize('name', ['leave_one_out', 'turn_leave_one_out'])
def test_a_baseline_of_the_other_rows_is_unbiased(name, trajectories):
  expected = _expected(trajectories, name)
  true = _true_gradient(trajectories)
  assert np.abs(expected - true).max() < 1e-12


def test_the_baseline_of_a_turn_has_the_smaller_variance():
  _, row = _moments(TRAJECTORIES, 'leave_one_out')
  _, turn = _moments(TRAJECTORIES, 'turn_leave_one_out')
  assert turn < 0.9 * row


def test_turn_group_pays_less_for_searching_the_more_the_policy_searches():
  p, q, _ = P
  share = (G - 1) / G  # the mean of the group includes the row
  true = _true_gradient(SIMPLE)
  np.testing.assert_allclose(true[FIRST], 0, atol=1e-15)
  np.testing.assert_allclose(
    _expected_turn_group(SIMPLE)[FIRST], -share * q * p**2 * (1 - p), rtol=1e-6
  )
  # With the deviation it is another number of the same sign.
  assert _expected(SIMPLE, 'turn_group')[FIRST] < -0.05


def test_the_bias_of_turn_group_is_what_the_last_turn_lacks():
  turn_rewards = lambda x: sum(x.rewards[:-1])
  mean = sum(_probability(x) * turn_rewards(x) for x in TRAJECTORIES)
  bias = np.zeros(len(P))
  for x in TRAJECTORIES:
    missing = (turn_rewards(x) - mean) * _scores(x)[len(x.choices) - 1]
    bias -= _probability(x) * missing
  assert np.abs(bias[[FIRST, SECOND]]).min() > 0.004
  assert np.abs(bias[QUALITY]) < 1e-15  # it decides nothing about stopping
  np.testing.assert_allclose(
    _expected_turn_group(TRAJECTORIES),
    (G - 1) / G * (_true_gradient(TRAJECTORIES) + bias),
    rtol=1e-6,
  )


@pytest.mark.parametrize('name', ['turn_group', 'turn_index'])
def test_the_bias_can_turn_an_update_around(name):
  true = _true_gradient(TRAJECTORIES)
  biased = _expected(TRAJECTORIES, name, turn_weight=1.0)
  assert true[FIRST] > 0.03
  assert biased[FIRST] < -0.03
