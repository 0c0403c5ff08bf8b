"""Metrics of a collection by hand, and records that JSON can write."""

import dataclasses
import json

import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.envs import search
from stppo_jax.records import trajectory_metrics
from tests.rollout import dialogues

_STATUS = types.TrajectoryStatus


def _measure(trajectories):
  return trajectory_metrics.measure(trajectories, search.SearchEnvironment)


def _turn(text, observation, action, reward=0.0, truncated=None):
  letters = dialogues.Letters()
  ids = letters.encode_text(text)
  return types.Turn(
    ids,
    np.zeros(len(ids), np.float32),
    letters.encode_text(observation),
    action,
    reward,
    truncated_logprobs=None if truncated is None else np.float32(truncated),
  )


def _trajectory(turns, status, *, em, data_set='nq', penalty=0.0):
  return types.Trajectory(
    question=types.Question('q', 'why?', ('x', 'y'), data_set),
    prompt_ids=dialogues.Letters().encode_text('why?'),
    turns=tuple(_turn(*turn) for turn in turns),
    rewards={'exact_match': np.float32(em), 'search_penalty': penalty},
    status=status,
    scores={'em': em, 'f1': 0.5},
  )


def _collection():
  return [
    _trajectory(
      [
        ('abc', 'found', 'search', 0.5, [0.5, 0.0, 1.0]),
        ('abcde', '', 'answer'),
      ],
      _STATUS.COMPLETED,
      em=1.0,
      penalty=-0.25,
    ),
    _trajectory(
      [('a', 'no', 'invalid', 0.0, [0.25])], _STATUS.TRUNCATED_LENGTH, em=0.0
    ),
    _trajectory(
      [('ab', 'no', 'invalid'), ('a', 'found', 'search'), ('a', '', 'answer')],
      _STATUS.COMPLETED,
      em=0.0,
      data_set='hotpotqa',
    ),
    # The numbers of a failed trajectory must have no effect.
    _trajectory(
      [('a' * 99, '', 'search', 7.0, [99.0] * 99)] * 9,
      _STATUS.INFRA_ERROR,
      em=9.0,
      data_set='ghost',
    ),
  ]


def test_by_hand():
  expected = {
    'rollout/status/completed': 2,
    'rollout/status/truncated_length': 1,
    'rollout/status/truncated_turns': 0,
    'rollout/status/infra_error': 1,
    'rollout/valid_fraction': 0.75,
    'critic/score/mean': 0.25,
    'critic/score/max': 0.75,
    'critic/score/min': 0,
    'response_length/mean': (8 + 1 + 4) / 3,
    'response_length/max': 8,
    'response_length/min': 1,
    'num_turns/mean': 2,
    'num_turns/max': 3,
    'num_turns/min': 1,
    'turn_length/mean': 13 / 6,
    'turn_length/max': 5,
    'turn_length/min': 1,
    'turn_length/tokens/turn_1': 3 + 1 + 2,
    'turn_length/tokens/turn_2': 5 + 1,
    'turn_length/tokens/turn_3': 1,
    'reward/exact_match/mean': 1 / 3,
    'reward/search_penalty/mean': -0.25 / 3,
    'reward/turns/mean': 0.5 / 3,
    'score/em/mean': 1 / 3,
    'score/f1/mean': 0.5,
    'train/em/nq': 0.5,
    'train/em/hotpotqa': 0,
    'mismatch/truncation': 1.75 / 4,
    'env/number_of_valid_search': 2 / 3,
    'env/ratio_of_valid_action': 4 / 6,
    'env/finish_ratio': 2 / 3,
  }
  assert _measure(_collection()) == pytest.approx(expected)
  # If no turn was cut off, there is nothing to measure.
  assert 'mismatch/truncation' not in _measure(_collection()[2:3])


def test_nothing_but_failures():
  metrics = _measure(_collection()[-1:])
  assert {name: x for name, x in metrics.items() if x} == {
    'rollout/status/infra_error': 1
  }


def test_text_that_a_turn_repeats_is_counted():
  rows = [
    _trajectory([(text, '', 'search') for text in texts], status, em=0.0)
    for texts, status in (
      (('abcabcabc', 'abcd'), _STATUS.COMPLETED),  # abca, bcab, cabc twice
      (('aaaaaaa', 'abc', ''), _STATUS.TRUNCATED_LENGTH),
      (('aaaaaaa',), _STATUS.INFRA_ERROR),
    )
  ]
  assert trajectory_metrics.count_tokens(rows) == {
    'rollout/policy_tokens': 9 + 4 + 7 + 3,
    'rollout/repeated_tokens': 3 + 3,
  }
  assert trajectory_metrics.count_tokens([]) == {
    'rollout/policy_tokens': 0,
    'rollout/repeated_tokens': 0,
  }


def _earned(em, turn_reward=0.0, status=_STATUS.COMPLETED):
  return _trajectory([('a', '', 'answer', turn_reward)], status, em=em)


_FAILED = _earned(9.0, status=_STATUS.INFRA_ERROR)


@pytest.mark.parametrize(
  ('group', 'expected'),
  [
    ([_earned(1.0), _earned(1.0), _earned(1.0)], True),
    ([_earned(1.0), _earned(1.0), _earned(0.0)], False),
    ([_earned(1.0), _FAILED, _earned(1.0)], True),
    # One row that is left has nothing to be compared with.
    ([_earned(1.0), _FAILED, _FAILED], False),
    ([_FAILED, _FAILED], False),
    ([_earned(1.0)], False),
    # Turns are part of what is earned.
    ([_earned(1.0), _earned(1.0, 0.5)], False),
    ([_earned(1.0), _earned(0.5, 0.5)], True),
    # In float32, the precision of the learner, 0.1 + 0.2 is 0.3.
    ([_earned(0.1, 0.2), _earned(0.3)], True),
  ],
)
def test_groups_without_variance(group, expected):
  assert trajectory_metrics.zero_variance(group) == expected


def test_groups_of_one_valid_row_are_not_counted():
  groups = [
    [_earned(1.0), _earned(1.0)],
    [_earned(1.0), _earned(0.0)],
    [_earned(0.0), _earned(0.0)],
    [_earned(1.0), _FAILED],
  ]
  name = 'rollout/zero_variance_groups'
  measure = trajectory_metrics.measure_groups
  assert measure(groups) == {name: pytest.approx(2 / 3)}
  # No alarm can ring where there is nothing to compare.
  assert not measure(groups[3:])


def test_a_record_is_plain_and_complete():
  record = trajectory_metrics.record(_collection()[0], dialogues.Letters())
  record = json.loads(json.dumps(record))
  assert record.pop('turns') == [
    {'text': text, 'observation': seen, 'action': action, 'reward': reward}
    for text, seen, action, reward in (
      ('abc', 'found', 'search', 0.5),
      ('abcde', '', 'answer', 0.0),
    )
  ]
  assert record == {
    'id': 'q',
    'question': 'why?',
    'golden_answers': ['x', 'y'],
    'data_set': 'nq',
    'prompt': 'why?',
    'rewards': {'exact_match': 1.0, 'search_penalty': -0.25},
    'scores': {'em': 1.0, 'f1': 0.5},
    'status': 'completed',
  }
  failed, healthy = _rows('xs')
  record = trajectory_metrics.record(failed, dialogues.Letters())
  assert record['cause'] == 'cause x'
  assert 'cause' not in trajectory_metrics.record(healthy, dialogues.Letters())


def _rows(*kinds):
  """Returns trajectories: 'a' answers, 's' searches and answers, 'x' fails.

  'o' has used up its searches, 'r' failed by an error of the environment, and
  'e' by the engine after a search.
  """
  turns = {
    'a': [('a', '', 'answer')],
    's': [('a', 'found', 'search'), ('a', '', 'answer')],
    'x': [('a', '', 'search')],
    'o': [('a', '', 'search')],
    'r': [('a', '', 'invalid')],
    'e': [('a', 'found', 'search')],
  }
  ends = {'a': _STATUS.COMPLETED, 's': _STATUS.COMPLETED}
  ends['o'] = _STATUS.TRUNCATED_TURNS
  return [
    dataclasses.replace(
      _trajectory(turns[kind], ends.get(kind, _STATUS.INFRA_ERROR), em=0.0),
      cause=f'cause {kind}' if kind in 'xr' else '',
    )
    for kind in ''.join(kinds)
  ]


@pytest.mark.parametrize(
  ('rows', 'fraction', 'turns'),
  [
    ('aas', 0.0, ''),
    # Rows that never search, or may not any more, hide no dead retriever.
    ('aaaaaaoxx', 1.0, '2 of 2 turns (search)'),
    ('aaaasxx', 2 / 3, '2 of 3 turns (search)'),
    # One query may be to blame itself.
    ('aaax', 1 / 4, '1 of 1 turns (search)'),
    # Turns whose action is not known are compared with all turns.
    ('aassrr', 1 / 3, '2 of 8 turns (invalid)'),
    ('ae', 1 / 2, ''),
    ('xxxx', 1.0, '4 of 4 turns (search)'),
  ],
)
def test_failures_are_compared_with_what_was_asked(rows, fraction, turns):
  failures = trajectory_metrics.failures(_rows(rows))
  assert failures.fraction == pytest.approx(fraction)
  assert turns in str(failures)
