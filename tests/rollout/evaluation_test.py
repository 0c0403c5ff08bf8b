"""Scores on fixed questions: their keys and the trajectories that count."""

import types as python_types

import jax
import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.envs import search
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.rollout import evaluation
from stppo_jax.rollout import steps
from tests.rollout import dialogues
from tests.training import runs

_STATUS = types.TrajectoryStatus


class _Questions:
  """Five questions, three of one data set and two of another."""

  def evaluation(self, count):
    self.count = count
    return {
      name: [types.Question(f'{name}{n}', '?', ('x',), name) for n in range(k)]
      for name, k in (('nq', 3), ('hotpotqa', 2))
    }


def _failed(question):
  return dialogues.trajectory(
    question=question,
    status=_STATUS.INFRA_ERROR,
    scores={'em': 9.0},
    cause='http://away: status 503',
  )


class _Sampler:
  """A fake of a collector, with a table of answers."""

  ems = {'nq0': 1.0, 'nq1': 0.0, 'nq2': 1.0, 'hotpotqa0': 0.0}

  def __init__(self):
    self.calls, self.outages = [], 0
    self.finish = lambda: None

  def collect(self, questions, keys, *, greedy):
    if self.outages:
      self.outages -= 1
      return [_failed(question) for question in questions]
    bits = np.asarray(jax.random.key_data(keys)).tolist()
    self.calls.append(([q.id for q in questions], bits, greedy))
    return [
      dialogues.trajectory(question=x, scores={'em': self.ems[x.id]})
      if x.id in self.ems
      else _failed(x)
      for x in questions
    ]


@pytest.fixture
def evaluated():
  """Returns (evaluator, fake, questions)."""
  fake, questions = _Sampler(), _Questions()
  config = runs.config(evaluate__num_questions=7)
  services = python_types.SimpleNamespace(
    questions=questions,
    environment=search.SearchEnvironment,
    retriever=dialogues.Ready(),
  )
  services.loop = services.retriever
  fake.retriever = services.retriever
  evaluator = evaluation.Evaluator(config, services, fake)
  return evaluator, fake, questions


def test_means_are_of_a_data_set_and_without_failures(evaluated):
  evaluator, fake, questions = evaluated
  scores, trajectories = evaluator.run()
  assert questions.count == 7
  # The second question of hotpotqa was failed by the infrastructure.
  assert scores == pytest.approx({'nq': 2 / 3, 'hotpotqa': 0.0})
  ids = [trajectory.question.id for trajectory in trajectories]
  assert ids == ['nq0', 'nq1', 'nq2', 'hotpotqa0', 'hotpotqa1']
  metrics, measured = evaluator.measure()
  assert [trajectory.question.id for trajectory in measured] == ids
  assert metrics == pytest.approx(
    {
      'val/em/nq': 2 / 3,
      'val/em/hotpotqa': 0.0,
      'evaluate/valid_fraction': 4 / 5,
    }
  )


class _TwoHosts(hosts_lib.Hosts):
  """The first of two hosts that have the same values."""

  def __init__(self):
    super().__init__(0, ['a', 'b'])

  def exchange(self, what, value, *, timeout=None):
    del what, timeout
    return [value, value]


def test_hosts_without_questions_have_no_metrics():
  services = python_types.SimpleNamespace(
    questions=python_types.SimpleNamespace(evaluation=lambda count: {}),
    environment=search.SearchEnvironment,
  )
  evaluator = evaluation.Evaluator(
    runs.config(), services, _Sampler(), hosts=_TwoHosts()
  )
  assert evaluator.measure() == ({}, [])


def test_every_question_has_a_key_of_its_own_always_the_same(evaluated):
  evaluator, fake, _ = evaluated
  evaluator.run()
  evaluator.run(greedy=False)
  # All of them at once: the engine has its slots filled.
  (first, keys, greedy), (second, same_keys, drawn) = fake.calls
  assert first == second == ['nq0', 'nq1', 'nq2', 'hotpotqa0', 'hotpotqa1']
  assert greedy and not drawn
  assert len(set(map(tuple, keys))) == len(keys) == 5
  assert same_keys == keys


def test_an_evaluation_in_an_outage_is_repeated(evaluated, said):
  evaluator, fake, _ = evaluated
  expected, _ = evaluator.run()
  failure = 'evaluation: 1 of 5 trajectories failed because of the infra'
  assert [line.startswith(failure) for line in said] == [True]
  said.clear()
  fake.outages = 2
  again, _ = evaluator.run()
  assert again == expected and fake.retriever.waits == 2
  first, second, _ = said
  assert first == second and 'http://away: status 503' in first
  fake.outages = 9
  with pytest.raises(steps.Outage, match='evaluation: .*status 503'):
    evaluator.run()
