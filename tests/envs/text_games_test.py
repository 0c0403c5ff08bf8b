"""Generated text games, solved through the loop that collects trajectories."""

import asyncio
import re

import pytest

from stppo_jax import types
from stppo_jax.data import games
from stppo_jax.envs import game_text
from stppo_jax.envs import text_games
from tests.rollout import dialogues
from tests.sampling import vocabularies

pytest.importorskip('textworld')

_STATUS = types.TrajectoryStatus
_QUESTIONS = games.GameQuestions(seed=0, count=0).evaluation(8)['games']


def _environment(**changes):
  options = dict(rooms=3, objects=4, quest_length=3, list_commands=True)
  options |= dict(max_turns=5, prompt_template='', solved=1.0)
  options |= dict(turn_progress=0.25)
  return text_games.TextWorldEnvironment(**(options | changes))


@pytest.fixture(scope='module')
def environment():
  return _environment()


def _write(command):
  return f'<think>x</think><action>{command}</action>'


def _collect(environment, scripts, questions, **options):
  return dialogues.collect_scripts(
    [[_write(command) for command in script] for script in scripts],
    environment,
    questions,
    tokenizer=vocabularies.bpe(),
    max_length=20_000,
    max_turn_tokens=200,
    max_observation_tokens=2000,
    **options,
  )


_BACK = {'north': 'south', 'south': 'north', 'east': 'west', 'west': 'east'}


def test_a_script_solves_games_and_is_rewarded_on_the_right_turns(environment):
  walk = next(
    question
    for question in _QUESTIONS
    if environment.solution(question)[0].startswith('go ')
  )
  first, *rest = environment.solution(walk)
  back = f'go {_BACK[first.removeprefix("go ")]}'
  scripts = [
    [first, *rest],
    [first, 'fly away', *rest],  # a wasted turn
    [first, back, first, *rest],  # a step that is undone
  ]
  trajectories = _collect(environment, scripts, [walk] * 3)
  assert [t.status for t in trajectories] == [_STATUS.COMPLETED] * 3
  assert [[turn.reward for turn in t.turns] for t in trajectories] == [
    [0.25, 0.25, 0.25],
    [0.25, 0.0, 0.25, 0.25],
    [0.25, -0.25, 0.25, 0.25, 0.25],
  ]
  assert trajectories[1].turns[1].action == 'invalid'
  for trajectory in trajectories:
    assert trajectory.rewards == {'solved': 1.0} == trajectory.scores


def test_trajectories_of_one_question_play_games_of_their_own(environment):
  question = _QUESTIONS[0]
  solution = environment.solution(question)
  trajectories = _collect(
    environment, [solution, ['wait'] * 6], [question], group_size=2
  )
  assert [t.status for t in trajectories] == [
    _STATUS.COMPLETED,
    _STATUS.TRUNCATED_TURNS,
  ]
  assert [t.scores['solved'] for t in trajectories] == [1.0, 0.0]
  counted = environment.statistics(trajectories)
  assert counted == {'env/number_of_commands': 1.5}


def test_the_prompt_tells_the_objective_and_what_can_be_done(environment):
  question = _QUESTIONS[0]
  prompt = environment.prompt(question)
  assert prompt == _environment().prompt(question)
  assert prompt != environment.prompt(_QUESTIONS[1])
  objective, scene, possible = prompt.splitlines()[1:]
  assert objective.startswith('Objective: ')
  assert scene.startswith('You are in the ')
  shown = possible.removeprefix('Commands: ').removesuffix('.').split(', ')
  assert environment.solution(question)[0] in shown
  assert 'Commands' not in _environment(list_commands=False).prompt(question)


def test_knobs_make_the_games(environment):
  question = _QUESTIONS[0]
  longer = _environment(quest_length=5)
  assert len(longer.solution(question)) == 5
  sparse = _environment(turn_progress=0.0)
  episode = sparse.episode(question)
  for turn_index, command in enumerate(sparse.solution(question)):
    step = asyncio.run(episode.step(question, turn_index, _write(command)))
    assert step.reward == 0.0
  assert step.status is _STATUS.COMPLETED


def test_demonstrations_are_played_to_the_end(environment):
  right = environment.demonstrate(_QUESTIONS[0], lambda right, _: right)
  solution = environment.solution(_QUESTIONS[0])
  assert [game_text.parse(turn) for turn in right] == solution
  offered = []

  def last(right, possible):
    assert right in possible and possible == sorted(possible)
    offered.append(possible)
    return possible[-1]

  other = environment.demonstrate(_QUESTIONS[0], last)
  assert len(other) == len(offered) <= 6
  script = [game_text.parse(turn) for turn in other]
  (found,) = _collect(environment, [script], _QUESTIONS[:1])
  assert not any(turn.action == 'invalid' for turn in found.turns)


def test_every_word_of_a_game_is_a_phrase(environment):
  phrases = environment.phrases([])
  for question in _QUESTIONS:
    game = environment.prompt(question).split('Objective: ')[1]
    for word in re.findall(r" ([A-Za-z][A-Za-z'-]*)", game):
      assert f' {word}' in phrases
