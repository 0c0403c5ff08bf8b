"""Packed arrays have masks, rewards and ids at the right tokens."""

import dataclasses

import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.rollout import pack
from tests.rollout import dialogues

_STATUS = types.TrajectoryStatus


def _trajectory(turns, **options):
  rewards = {'a': 0.75, 'b': -0.5}
  return dialogues.trajectory(turns, rewards=rewards, **options)


_SHORT = [([7], [-0.7], [])]
_LONG = [
  ([3, 4], [-0.3, -0.4], [5, 5, 5]),
  ([6], [-0.6], [8]),
  ([9, 9], [-0.8, -0.9], []),
]


def test_all_arrays_are_aligned_by_token():
  batch = pack.pack([_trajectory(_SHORT), _trajectory(_LONG)], length_bucket=4)
  # Eleven tokens need three buckets of four.
  assert batch.tokens_BL.tolist() == [
    [1, 2, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    [1, 2, 3, 4, 5, 5, 5, 6, 8, 9, 9, 0],
  ]
  assert batch.turn_ids_BL.tolist() == [
    [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    [0, 0, 1, 1, 0, 0, 0, 2, 0, 3, 3, 0],
  ]
  np.testing.assert_array_equal(batch.loss_mask_BL, batch.turn_ids_BL > 0)
  # Five of twelve tokens: two quarters.
  assert batch.loss_positions_BM.tolist() == [
    [2, 12, 12, 12, 12, 12],
    [2, 3, 7, 9, 10, 12],
  ]
  zeros = np.zeros(12)
  expected = np.stack([zeros, zeros])
  expected[0, 2] = -0.7
  expected[1, [2, 3, 7, 9, 10]] = [-0.3, -0.4, -0.6, -0.8, -0.9]
  np.testing.assert_allclose(batch.sampler_logprobs_BL, expected, atol=1e-7)
  assert batch.lengths_B.tolist() == [3, 11]
  dtypes = [
    getattr(batch, name).dtype.name
    for name in ('tokens_BL', 'lengths_B', 'turn_ids_BL', 'loss_mask_BL')
  ]
  assert dtypes == ['int32', 'int32', 'int32', 'bool']
  assert batch.loss_positions_BM.dtype == np.int32
  assert batch.sampler_logprobs_BL.dtype == batch.rewards_BL.dtype == np.float32


def test_loss_positions_take_few_shapes():
  rng = np.random.default_rng(0)
  sizes = {}
  for count in range(11):
    mask_BL = np.zeros((2, 10), bool)
    mask_BL[0, rng.choice(10, count, replace=False)] = True
    found_BM = pack.loss_positions(mask_BL)
    sizes.setdefault(found_BM.shape[1], []).append(count)
    assert found_BM[0, :count].tolist() == np.flatnonzero(mask_BL[0]).tolist()
    assert (found_BM[0, count:] == 10).all() and (found_BM[1] == 10).all()
  # A quarter of ten is rounded up, the whole is the whole.
  assert sizes == {3: [0, 1, 2, 3], 6: [4, 5, 6], 9: [7, 8, 9], 10: [10]}


@pytest.mark.parametrize(
  ('turns', 'rewards'),
  [
    # The last turn is empty; an observation follows the turn before it.
    ([([3, 4], [5, 5], 0.0), ([], [6], 0.0)], [0, 0.25, 0, 0, 0]),
    # The reward of a turn is at its last token, and the outcome, 0.25, is added
    # where the last turn with tokens ends.
    (
      [([3, 4], [5, 5], 2.0), ([6], [8], 0.0), ([9, 9], [7], -4.0)],
      [0, 2.0, 0, 0, 0, 0, 0, -3.75, 0],
    ),
    ([([3, 4], [5], 2.0), ([], [], 0.0)], [0, 2.25, 0]),
  ],
)
def test_rewards_are_at_the_last_policy_token(turns, rewards):
  turns = [(ids, [-1] * len(ids), *others) for ids, *others in turns]
  batch = pack.pack([_trajectory(turns)], length_bucket=1)
  assert batch.rewards_BL.tolist() == [[0, 0, *rewards]]
  failed = _trajectory(turns, status=_STATUS.INFRA_ERROR)
  assert not pack.pack([failed], length_bucket=1).rewards_BL.any()


def test_a_failed_row_has_tokens_and_no_loss():
  failed = _trajectory(_LONG, status=_STATUS.INFRA_ERROR)
  batch = pack.pack([failed, _trajectory(_LONG)], length_bucket=4)
  for x_BL in (batch.tokens_BL, batch.turn_ids_BL):
    np.testing.assert_array_equal(x_BL[0], x_BL[1])
  assert batch.loss_mask_BL.sum(1).tolist() == [0, 5]
  assert batch.loss_positions_BM[0].tolist() == [12] * 6


def test_lengths_are_multiples_of_the_bucket():
  for prompt, length in ((6, 8), (7, 8), (8, 16)):
    trajectory = _trajectory(_SHORT, prompt=range(prompt))
    batch = pack.pack([trajectory], length_bucket=8)
    assert batch.tokens_BL.shape == (1, length)


@pytest.mark.parametrize(
  ('bucket', 'max_length', 'expected'),
  [
    (256, 4096, 512),  # not 16 lengths, but 8
    (256, 4097, 768),
    (32, 192, 32),
    (128, 640, 128),
    (500, 100, 500),
    (1, 8, 1),
  ],
)
def test_there_are_at_most_eight_lengths(bucket, max_length, expected):
  unit = pack.unit(bucket, max_length=max_length)
  assert unit == expected and unit % bucket == 0
  assert -(-max_length // unit) <= pack.MAX_LENGTHS


def test_rows_of_one_question_share_a_group():
  # The fourth is another question with the same id.
  places = [
    ('a', 'nq'),
    ('b', 'nq'),
    ('a', 'nq'),
    ('a', 'hotpotqa'),
    ('b', 'nq'),
  ]
  questions = [dialogues.question('why?', *place) for place in places]
  batch = pack.pack(
    [_trajectory(_SHORT, question=question) for question in questions],
    length_bucket=4,
  )
  assert batch.group_ids_B.tolist() == [0, 1, 0, 2, 1]
  assert batch.group_ids_B.dtype == np.int32


def _turns(*observations):
  """Returns turns of two tokens, each followed by one of the observations."""
  return [([3, 4], [-1, -1], ids) for ids in observations]


def test_states_are_pairs_of_question_and_latest_observation():
  rows = [
    (('a', 'nq'), _turns([5, 5], [6], [])),
    (('a', 'nq'), _turns([6], [5, 5], [])),  # the same in another order
    (('b', 'nq'), _turns([5, 5], [])),  # the same of another question
    (('a', 'hotpotqa'), _turns([])),
    # A turn after an empty observation is no first turn.
    (('a', 'nq'), _turns([], [6, 6], [])),
  ]
  batch = pack.pack(
    [
      _trajectory(turns, question=dialogues.question('why?', *place))
      for place, turns in rows
    ],
    length_bucket=1,
  )
  policy_BL = batch.turn_ids_BL > 0
  assert ((batch.state_ids_BL > 0) == policy_BL).all()
  assert batch.state_ids_BL.dtype == np.int32
  seen = {}  # state -> ids, read by plain loops
  for n, (place, turns) in enumerate(rows):
    observation = 'nothing'
    for turn_id, (_, _, observation_ids) in enumerate(turns, start=1):
      state = *place, str(observation)
      own = batch.state_ids_BL[n][batch.turn_ids_BL[n] == turn_id]
      seen.setdefault(state, set()).update(own.tolist())
      observation = observation_ids
  assert all(len(ids) == 1 for ids in seen.values())
  assert len(set.union(*seen.values())) == len(seen) == 8


def test_sentences_are_counted_through_the_row():
  # Even tokens end a sentence; observations belong to none.
  turns = [
    ([3, 4, 5], [-1] * 3, [2, 2]),  # one sentence ends at 4, one with the turn
    ([6], [-1], []),
    ([], [], [9]),
    ([7, 7, 8, 2], [-1] * 4, []),
  ]
  splits = lambda ids: 1 + np.cumsum(ids % 2 == 0) - (ids % 2 == 0)
  rows = [_trajectory(turns), _trajectory(_SHORT)]
  batch = pack.pack(rows, length_bucket=16, sentences=splits)
  row = [0, 0, 1, 1, 2, 0, 0, 3, 0, 4, 4, 4, 5, 0, 0, 0]
  assert batch.sentence_ids_BL.tolist() == [row, [0, 0, 1] + [0] * 13]
  assert batch.sentence_ids_BL.dtype == np.int32
  assert pack.pack(rows, length_bucket=16).sentence_ids_BL is None


def _with_experts(trajectory, first):
  """Adds the experts of two layers, three per token, numbered from `first`."""
  turns = trajectory.turns
  size = len(trajectory.prompt_ids) + sum(
    len(turn.token_ids) + len(turn.observation_ids) for turn in turns
  )
  ids = first + np.arange(size * 6, dtype=np.int16).reshape(size, 2, 3)
  return dataclasses.replace(trajectory, expert_ids=ids)


def test_experts_are_at_their_tokens_only():
  long, short = _trajectory(_LONG), _trajectory(_SHORT)
  failed = _trajectory(_SHORT, status=_STATUS.INFRA_ERROR)
  empty = _trajectory([], status=_STATUS.TRUNCATED_LENGTH)
  rows = [_with_experts(long, 0), _with_experts(short, 500), failed, empty]
  batch = pack.pack(rows, length_bucket=4, with_expert_ids=True)
  found = batch.expert_ids
  assert found.shape == (4, 12, 2, 3) and found.dtype == np.int16
  np.testing.assert_array_equal(found[0, :11], rows[0].expert_ids)
  np.testing.assert_array_equal(found[1, :3], rows[1].expert_ids)
  assert (found[0, 11:] == -1).all() and (found[1, 3:] == -1).all()
  assert (found[2:] == -1).all()
  assert pack.pack(rows, length_bucket=4).expert_ids is None


def test_experts_that_were_not_reported_cannot_be_packed():
  rows = [_with_experts(_trajectory(_LONG), 0), _trajectory(_SHORT)]
  with pytest.raises(ValueError, match='1 of 2 trajectories lack the experts'):
    pack.pack(rows, length_bucket=4, with_expert_ids=True)
