"""Dialogues are collected token by token, in every way that they can end."""

import math

import pytest

from stppo_jax import types
from stppo_jax.rollout import collect
from stppo_jax.rollout import pack
from stppo_jax.sampling import scripted
from tests.rollout import dialogues

_STATUS = types.TrajectoryStatus
_DONE = dialogues.end(_STATUS.COMPLETED)


def _text(ids):
  return dialogues.Letters().decode(ids)


def test_a_dialogue_equals_the_one_by_hand():
  environment = dialogues.TableEnvironment(
    {'ab!': dialogues.observe('xyz'), 'c.': _DONE}
  )
  (trajectory,) = dialogues.collect_scripts(
    [['ab!', 'c.']], environment, [dialogues.question('Q:')]
  )
  assert _text(trajectory.prompt_ids) == 'Q:'
  turns = [
    (_text(turn.token_ids), _text(turn.observation_ids), turn.action)
    for turn in trajectory.turns
  ]
  assert turns == [('ab!', '[xyz]', 'search'), ('c.', '', 'answer')]
  assert trajectory.status is _STATUS.COMPLETED
  assert trajectory.reward == 1.0 and trajectory.scores == {'em': 1.0}
  # The environment gets what the policy wrote, and nothing else.
  assert environment.calls == [('q', 0, 'ab!'), ('q', 1, 'c.')]
  assert environment.ends == [('q', 'Q:', ['ab!', 'c.'], _STATUS.COMPLETED)]
  batch = pack.pack([trajectory], length_bucket=4)
  line = 'Q:ab![xyz]c.'
  assert _text(batch.tokens_BL[0, : len(line)]) == line
  assert batch.turn_ids_BL[0].tolist() == [int(c) for c in '001110000022']
  assert batch.loss_mask_BL[0].tolist() == [c != '0' for c in '001110000022']
  assert batch.rewards_BL[0].tolist() == [0.0] * 11 + [1.0]


def test_rows_are_independent_and_keep_their_order():
  environment = dialogues.TableEnvironment(
    {
      'a': dialogues.observe('1'),
      'b': dialogues.observe('2'),
      'x': dialogues.end(_STATUS.INFRA_ERROR, 'search'),
      'y': dialogues.end(_STATUS.TRUNCATED_TURNS, 'search'),
      'z': _DONE,
    }
  )
  questions = [dialogues.question(f'Q{n}', f'q{n}') for n in range(4)]
  trajectories = dialogues.collect_scripts(
    [['a', 'b', 'z'], ['z'], ['b', 'x'], ['b', 'a', 'y']],
    environment,
    questions,
  )
  assert [t.question for t in trajectories] == questions
  assert [t.status for t in trajectories] == [
    _STATUS.COMPLETED,
    _STATUS.COMPLETED,
    _STATUS.INFRA_ERROR,
    _STATUS.TRUNCATED_TURNS,
  ]
  assert [
    ''.join(
      _text(turn.token_ids) + _text(turn.observation_ids) for turn in t.turns
    )
    for t in trajectories
  ] == ['a[1]b[2]z', 'z', 'b[2]x', 'b[2]a[1]y']
  # Each step gets the turn of its own row.
  assert [call[1:] for call in environment.calls if call[0] == 'q3'] == [
    (0, 'b'),
    (1, 'a'),
    (2, 'y'),
  ]


@pytest.mark.parametrize(
  ('max_length', 'status', 'observation', 'last'),
  [
    # Q: ab! [xyz] are ten tokens; one more is needed to go on.
    (10, _STATUS.TRUNCATED_LENGTH, '', 'ab!'),
    (11, _STATUS.COMPLETED, '[xyz]', 'c'),
  ],
)
def test_an_observation_must_leave_room_to_write(
  max_length, status, observation, last
):
  environment = dialogues.TableEnvironment(
    {'ab!': dialogues.observe('xyz'), 'c': _DONE}
  )
  (trajectory,) = dialogues.collect_scripts(
    [['ab!', 'c']],
    environment,
    [dialogues.question('Q:')],
    max_length=max_length,
  )
  assert trajectory.status is status
  assert _text(trajectory.turns[0].observation_ids) == observation
  assert _text(trajectory.turns[-1].token_ids) == last
  assert environment.ends[0][3] is status


@pytest.mark.parametrize('reward', [math.nan, math.inf, 1e39])
def test_a_reward_that_is_not_finite_fails_its_trajectory(reward, caplog):
  environment = dialogues.TableEnvironment(
    {'a': dialogues.observe('1', reward=reward), 'b': _DONE}
  )
  questions = [dialogues.question('Q')] * 2
  poisoned, sound = dialogues.collect_scripts(
    [['a', 'b'], ['b']], environment, questions
  )
  assert sound.status is _STATUS.COMPLETED and sound.reward == 1.0
  assert poisoned.status is _STATUS.INFRA_ERROR
  number = 'expected a finite number'
  expected = f'ValueError: the reward of a turn is {reward}, {number}'
  assert poisoned.cause == expected
  environment = dialogues.TableEnvironment({'b': _DONE}, {'right': reward})
  (poisoned,) = dialogues.collect_scripts([['b']], environment, questions[:1])
  assert poisoned.status is _STATUS.INFRA_ERROR and not poisoned.reward
  assert poisoned.cause == f'ValueError: the reward right is {reward}, {number}'
  assert all(record.levelname == 'ERROR' for record in caplog.records)


@pytest.mark.parametrize(
  ('step', 'status'),
  [
    # The turn is invalid because the length cut it.
    (dialogues.end(_STATUS.TRUNCATED_TURNS, 'invalid'), 'TRUNCATED_LENGTH'),
    (dialogues.observe('', 'invalid'), 'TRUNCATED_LENGTH'),
    # The action is complete all the same, or the infrastructure failed.
    (dialogues.end(_STATUS.TRUNCATED_TURNS, 'search'), 'TRUNCATED_TURNS'),
    (dialogues.end(_STATUS.COMPLETED), 'COMPLETED'),
    (dialogues.end(_STATUS.INFRA_ERROR, 'search'), 'INFRA_ERROR'),
  ],
)
def test_an_invalid_turn_that_fills_the_row_is_truncated(step, status):
  (trajectory,) = dialogues.collect_scripts(
    [['abcdef']],
    dialogues.TableEnvironment({'abc': step}),
    [dialogues.question('Q:')],
    max_length=5,
  )
  assert _text(trajectory.turns[0].token_ids) == 'abc'
  assert trajectory.status is _STATUS[status]


def test_a_dialogue_goes_on_after_a_turn_that_its_own_limit_cuts():
  environment = dialogues.TableEnvironment(
    {'abc': dialogues.observe('?', 'invalid'), 'd': _DONE}
  )
  (trajectory,) = dialogues.collect_scripts(
    [['abcdef', 'd']],
    environment,
    [dialogues.question('Q:')],
    max_turn_tokens=3,
  )
  assert [turn.action for turn in trajectory.turns] == ['invalid', 'answer']
  assert trajectory.status is _STATUS.COMPLETED


@pytest.mark.parametrize(
  ('limit', 'observation'),
  [(8, '[123456]'), (7, '[12345]'), (3, '[1]'), (2, '[]'), (1, '[]')],
)
def test_only_the_body_of_an_observation_is_cut(limit, observation):
  (trajectory,) = dialogues.collect_scripts(
    [['a', 'b']],
    dialogues.TableEnvironment({'a': dialogues.observe('123456'), 'b': _DONE}),
    [dialogues.question('Q:')],
    max_observation_tokens=limit,
  )
  assert _text(trajectory.turns[0].observation_ids) == observation


def test_a_prompt_without_room_is_truncated_and_other_rows_go_on():
  long, short = dialogues.collect_scripts(
    [['a'], ['b']],
    dialogues.TableEnvironment({'b': _DONE}),
    [dialogues.question('1234567', 'q7'), dialogues.question('12', 'q8')],
    max_length=5,
  )
  assert long.status is types.TrajectoryStatus.TRUNCATED_LENGTH
  assert long.turns == () and len(long.prompt_ids) == 5
  assert short.status is types.TrajectoryStatus.COMPLETED
  batch = pack.pack([long, short], length_bucket=8)
  assert not batch.loss_mask_BL[0].any() and batch.loss_mask_BL[1].any()


def test_rows_of_a_group_have_a_question_in_common():
  environment = dialogues.TableEnvironment(
    {'a': dialogues.observe('1', reward=0.25), 'b': _DONE, 'c': _DONE}
  )
  questions = [
    dialogues.question('Q1', 'q1'),
    dialogues.question('1234567', 'long'),
    dialogues.question('Q2', 'q2'),
  ]
  trajectories = dialogues.collect_scripts(
    [['a', 'b'], ['c'], ['b'], ['b'], ['c'], ['a', 'c']],
    environment,
    questions,
    max_length=7,
    group_size=2,
  )
  assert [t.question.id for t in trajectories] == [
    'q1',
    'q1',
    'long',
    'long',
    'q2',
    'q2',
  ]
  written = [
    ''.join(_text(turn.token_ids) for turn in t.turns) for t in trajectories
  ]
  assert written == ['ab', 'c', '', '', 'c', 'ac']
  assert [t.status is _STATUS.COMPLETED for t in trajectories] == [
    text != '' for text in written
  ]
  assert environment.prompted == ['q1', 'long', 'q2']
  assert pack.pack(trajectories, length_bucket=1).group_ids_B.tolist() == [
    0,
    0,
    1,
    1,
    2,
    2,
  ]
  # The reward of a turn does not depend on the outcome.
  turn_rewards = [[turn.reward for turn in t.turns] for t in trajectories]
  assert turn_rewards == [[0.25, 0], [0], [], [], [0], [0.25, 0]]
  assert [t.turn_reward for t in trajectories] == [0.25, 0, 0, 0, 0, 0.25]
  assert {t.reward for t in trajectories} == {1.0}


def test_the_engine_gets_one_prompt_for_a_group():
  engine = scripted.ScriptedEngine(dialogues.letters(*[['a']] * 6), 5)
  calls, begin = [], engine.begin

  def counted(prompts, keys, **options):
    texts = [None if ids is None else _text(ids) for ids in prompts]
    calls.append((texts, keys, options))
    begin(prompts, keys, **options)

  engine.begin = counted
  questions = [dialogues.question(text) for text in ('Q1', '1234567', 'Q22')]
  environment = dialogues.TableEnvironment({'a': _DONE})
  options = {'max_turn_tokens': 4, 'group_size': 2}
  with dialogues.collector(engine, environment, **options) as collector:
    collector.collect(questions, 'keys', greedy=True)
  options = {'group_size': 2, 'max_turn_tokens': 4, 'greedy': True}
  assert calls == [(['Q1', None, 'Q22'], 'keys', options)]


@pytest.mark.parametrize(
  ('script', 'status', 'expected'),
  [
    # With the prompt Q: of two tokens; the interval is tokens 13 to 20.
    ('a' * 9 + 'z', 'COMPLETED', 0.0),  # 12
    ('a' * 11 + 'z', 'COMPLETED', -0.5),  # 14
    ('a' * 16 + 'z', 'COMPLETED', -1.75),  # 19
    ('a' * 17 + 'z', 'COMPLETED', -2.0),  # 20
    ('a' * 20 + 'z', 'TRUNCATED_LENGTH', -2.0),
    ('a' * 16 + 'x', 'INFRA_ERROR', 0.0),
    # 12 tokens and an observation that did not fit: cut off, whatever is left.
    ('a' * 9 + 'o', 'TRUNCATED_LENGTH', -2.0),
  ],
)
def test_long_trajectories_are_punished(script, status, expected):
  ends = {
    'x': dialogues.end(_STATUS.INFRA_ERROR, 'search'),
    'o': dialogues.observe('12345678'),
    'a': dialogues.end(_STATUS.TRUNCATED_TURNS, 'invalid'),
    'z': _DONE,
  }
  limit = 20
  environment = dialogues.TableEnvironment({script[:18]: ends[script[:18][-1]]})
  (trajectory,) = dialogues.collect_scripts(
    [[script]],
    environment,
    [dialogues.question('Q:')],
    max_length=limit,
    overlong=collect.Overlong(weight=2.0, max_length=limit, interval=8.0),
  )
  assert trajectory.status is _STATUS[status]
  assert trajectory.rewards['overlong'] == expected
  others = {n: x for n, x in trajectory.rewards.items() if n != 'overlong'}
  assert trajectory.reward == pytest.approx(sum(others.values()) + expected)
