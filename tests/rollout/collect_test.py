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


def _collect_one(turns, steps, **options):
  """Returns the trajectory of a dialogue that begins with the prompt `Q:`."""
  (trajectory,) = dialogues.collect_scripts(
    [turns],
    dialogues.TableEnvironment(steps),
    [dialogues.question('Q:')],
    **options,
  )
  return trajectory


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
  found = []
  for trajectory in trajectories:
    pieces = [
      (turn.token_ids, turn.observation_ids) for turn in trajectory.turns
    ]
    text = ''.join(_text(ids) for piece in pieces for ids in piece)
    found.append((text, trajectory.status.name))
  assert found == [
    ('a[1]b[2]z', 'COMPLETED'),
    ('z', 'COMPLETED'),
    ('b[2]x', 'INFRA_ERROR'),
    ('b[2]a[1]y', 'TRUNCATED_TURNS'),
  ]
  # Each step gets the turn of its own row.
  calls = [call[1:] for call in environment.calls if call[0] == 'q3']
  assert calls == [(0, 'b'), (1, 'a'), (2, 'y')]


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
  steps = {'ab!': dialogues.observe('xyz'), 'c': _DONE}
  trajectory = _collect_one(['ab!', 'c'], steps, max_length=max_length)
  assert trajectory.status is status
  assert _text(trajectory.turns[0].observation_ids) == observation
  assert _text(trajectory.turns[-1].token_ids) == last


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
  trajectory = _collect_one(['abcdef'], {'abc': step}, max_length=5)
  assert _text(trajectory.turns[0].token_ids) == 'abc'
  assert trajectory.status is _STATUS[status]


def test_a_dialogue_goes_on_after_a_turn_that_its_own_limit_cuts():
  steps = {'abc': dialogues.observe('?', 'invalid'), 'd': _DONE}
  trajectory = _collect_one(['abcdef', 'd'], steps, max_turn_tokens=3)
  assert [turn.action for turn in trajectory.turns] == ['invalid', 'answer']
  assert trajectory.status is _STATUS.COMPLETED


@pytest.mark.parametrize(
  ('limit', 'observation'),
  [(8, '[123456]'), (7, '[12345]'), (3, '[1]'), (2, '[]'), (1, '[]')],
)
def test_only_the_body_of_an_observation_is_cut(limit, observation):
  steps = {'a': dialogues.observe('123456'), 'b': _DONE}
  trajectory = _collect_one(['a', 'b'], steps, max_observation_tokens=limit)
  assert _text(trajectory.turns[0].observation_ids) == observation


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
  ids = [t.question.id for t in trajectories]
  assert ids == ['q1', 'q1', 'long', 'long', 'q2', 'q2']
  written = [
    ''.join(_text(turn.token_ids) for turn in t.turns) for t in trajectories
  ]
  assert written == ['ab', 'c', '', '', 'c', 'ac']
  assert environment.prompted == ['q1', 'long', 'q2']
  # A prompt without room is cut, and the other rows go on.
  for number, trajectory in enumerate(trajectories):
    long = number in (2, 3)
    assert trajectory.status is (
      _STATUS.TRUNCATED_LENGTH if long else _STATUS.COMPLETED
    )
    assert len(trajectory.prompt_ids) == (7 if long else 2)
  ends = sorted(status.name for *_, status in environment.ends)
  assert ends == ['COMPLETED'] * 4 + ['TRUNCATED_LENGTH'] * 2
  batch = pack.pack(trajectories, length_bucket=1)
  assert batch.group_ids_B.tolist() == [0, 0, 1, 1, 2, 2]
  assert (batch.loss_mask_BL.sum(1) > 0).tolist() == [
    text != '' for text in written
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
  trajectory = _collect_one(
    [script],
    {script[:18]: ends[script[:18][-1]]},
    max_length=limit,
    overlong=collect.Overlong(weight=2.0, max_length=limit, interval=8.0),
  )
  assert trajectory.status is _STATUS[status]
  assert trajectory.rewards['overlong'] == expected
  others = {n: x for n, x in trajectory.rewards.items() if n != 'overlong'}
  assert trajectory.reward == pytest.approx(sum(others.values()) + expected)
