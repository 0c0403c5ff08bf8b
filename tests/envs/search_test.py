"""The search environment: every outcome of a turn, rewards and scores."""

import asyncio
import dataclasses

import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.envs import search
from stppo_jax.retrieval import fakes

_STATUS = types.TrajectoryStatus
_QUESTION = types.Question(
  'q', 'Capital of France?', ('Paris',), 'nq', corpus='worlds/3'
)
_WEIGHTS = dict(exact_match=1.0, substring_match=0.5, f1=0.25, format=0.125)
_WEIGHTS |= dict(search_penalty=0.0625, turn_search=0.03125)
_WEIGHTS |= dict(turn_answer_found=2.0, turn_first_found=0.0)
_SEARCH = '<think>a</think><search> capital </search>'
_ANSWER = '<answer>city of Paris</answer>'


def _environment(retriever=None, **changes):
  options = dict(
    retriever=retriever or fakes.FakeRetriever({}),
    max_turns=2,
    prompt_template='',
    rewards=_WEIGHTS,
    reward_scope='response',
  )
  return search.SearchEnvironment(**(options | changes))


def _step(environment, turn_index, text, question=_QUESTION):
  return asyncio.run(environment.step(question, turn_index, text))


def test_a_search_is_answered_from_the_corpus_of_the_question():
  retriever = fakes.FakeRetriever(
    {'capital': [types.Passage('1', 'France', 'Paris </Answer>')]}
  )
  step = _step(_environment(retriever), 1, _SEARCH)
  assert (step.action, step.status) == ('search', None)
  assert step.observation.text == (
    '\n\n<information>Doc 1(Title: France) Paris (/Answer)\n</information>\n\n'
  )
  assert retriever.calls == [('worlds/3', 'capital')]


_OPTIONS = {'A': 'Mask', 'B': 'Bag and mask'}
_CHOICE = types.Question('q', 'Oxygen?', ('B',), 'nq', 'choice', _OPTIONS)


@pytest.mark.parametrize(
  ('question', 'texts', 'reward'),
  [
    (_QUESTION, [], 0.0),
    (_QUESTION, [('Lyon', 'A town.')], 0.03125),
    (_QUESTION, [('PARIS!', 'A town.')], 2.03125),
    # Found twice counts once.
    (_QUESTION, [('Lyon', ''), ('', 'It is paris.'), ('', 'Paris')], 2.03125),
    # The text of the golden option is looked for.
    (_CHOICE, [('', 'Vitamin B')], 0.03125),
    (_CHOICE, [('', 'a Bag and mask')], 2.03125),
  ],
)
def test_the_reward_of_a_search_depends_on_what_it_found(
  question, texts, reward
):
  passages = [types.Passage('1', *each) for each in texts]
  retriever = fakes.FakeRetriever({'capital': passages})
  step = _step(_environment(retriever), 1, _SEARCH, question)
  assert step.reward == reward


def test_the_first_turn_that_finds_the_answer_can_be_paid_alone():
  retriever = fakes.FakeRetriever(
    {
      'town': [types.Passage('1', 'Lyon', 'A town.')],
      'capital': [types.Passage('2', 'Paris', 'A capital.')],
    }
  )
  weights = dict.fromkeys(_WEIGHTS, 0.0) | {'turn_first_found': 0.5}
  environment = _environment(retriever, rewards=weights, max_turns=9)
  queries = ['town', 'capital', 'capital', 'town', 'capital']
  for _ in range(2):  # each trajectory has a first turn of its own
    episode = environment.episode(_QUESTION)
    earned = [
      _step(episode, i, f'<search>{query}</search>').reward
      for i, query in enumerate(queries)
    ]
    assert earned == [0.0, 0.5, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
  ('turn_index', 'text', 'action', 'status'),
  [
    (0, '<search> </search>', 'invalid', None),
    (0, _ANSWER, 'answer', _STATUS.COMPLETED),
    (2, _ANSWER, 'answer', _STATUS.COMPLETED),
    (2, _SEARCH, 'search', _STATUS.TRUNCATED_TURNS),
    (2, 'hm', 'invalid', _STATUS.TRUNCATED_TURNS),
  ],
)
def test_turns_without_a_search(turn_index, text, action, status):
  retriever = fakes.FakeRetriever({})
  step = _step(_environment(retriever), turn_index, text)
  assert (step.action, step.status) == (action, status)
  assert (step.observation is None) == (status is not None)
  assert retriever.calls == []


def test_a_failed_retrieval_ends_the_trajectory():
  retriever = fakes.FakeRetriever({}, fail_on=['capital'])
  step = _step(_environment(retriever), 0, _SEARCH)
  assert (step.action, step.observation) == ('search', None)
  assert step.status is _STATUS.INFRA_ERROR


def test_rewards_and_scores_by_hand():
  rewards, scores = _environment().rewards(
    _QUESTION, 'prompt', [_SEARCH, _SEARCH, _ANSWER], _STATUS.COMPLETED
  )
  # One common word of three and one: f1 = 2 / 4.
  assert scores == {'em': 0, 'substring_match': 1, 'f1': 0.5, 'format': 1}
  assert rewards == {
    'exact_match': 0.0,
    'substring_match': 0.5,
    'f1': 0.125,
    'format': 0.125,
    'search_penalty': -0.125,
  }
  assert all(type(value) is float for value in (rewards | scores).values())


@pytest.mark.parametrize(
  ('exact', 'substring', 'main'),
  [(1, 0, 'em'), (1, 1, 'em'), (0, 0, 'em'), (0, 1, 'substring_match')],
)
def test_the_main_score_is_one_that_is_rewarded(exact, substring, main):
  weights = {'exact_match': exact, 'substring_match': substring}
  environment = _environment(rewards=_WEIGHTS | weights)
  assert environment.main_score == main
  _, scores = environment.rewards(_QUESTION, '', [_ANSWER], _STATUS.COMPLETED)
  assert scores[main] == (main == 'substring_match')


@pytest.mark.parametrize(
  ('status', 'total'),
  [(_STATUS.TRUNCATED_TURNS, -0.0625), (_STATUS.INFRA_ERROR, 0.0)],
)
def test_a_truncated_trajectory_pays_for_its_searches(status, total):
  rewards, scores = _environment().rewards(_QUESTION, '', [_SEARCH], status)
  assert rewards.keys() == set(search.OUTCOME_NAMES)
  assert set(scores.values()) == {0.0}
  assert sum(rewards.values()) == total


@pytest.mark.parametrize('scope', ['response', 'search_r1'])
def test_the_scope_says_where_the_answer_is_sought(scope):
  environment = _environment(reward_scope=scope)
  prompt = environment.prompt(_QUESTION)
  spoof = prompt + '<answer>Paris</answer>'
  for asked, text, em in (
    (prompt, '<answer>Paris</answer>', 1.0),
    (spoof, 'hm', float(scope == 'search_r1')),  # a fault of that scope
  ):
    _, scores = environment.rewards(_QUESTION, asked, [text], _STATUS.COMPLETED)
    assert scores['em'] == em


@pytest.mark.parametrize('golden', ['B', 'Bag and mask'])
def test_choice_questions_are_scored_by_the_option(golden):
  question = dataclasses.replace(_CHOICE, golden_answers=(golden,))
  for answer, em, f1 in (('B', 1, 1), ('bag and mask', 1, 1), ('A', 0, 0.5)):
    rewards, scores = _environment().rewards(
      question, '', [f'<answer>{answer}</answer>'], _STATUS.COMPLETED
    )
    assert (scores['em'], scores['f1']) == (em, f1)
    assert rewards['exact_match'] == em
  # "mask" is part of the golden text, not the other way round.
  assert scores['substring_match'] == 0.0


def test_valid_searches_are_counted_per_trajectory():
  ids = np.zeros(1, np.int32)
  trajectories = [
    types.Trajectory(
      _QUESTION,
      ids,
      tuple(types.Turn(ids, ids, ids, action) for action in actions),
      {},
      _STATUS.COMPLETED,
    )
    for actions in (['search', 'search', 'answer'], ['invalid'])
  ]
  assert search.SearchEnvironment.statistics(trajectories) == {
    'env/number_of_valid_search': 1.0
  }
