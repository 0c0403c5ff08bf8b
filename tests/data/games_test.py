"""Numbers of games are the same in every call and never those of evaluation."""

import pytest

from stppo_jax.configs import base
from stppo_jax.data import games
from stppo_jax.training.building import assembly


def _ids(questions):
  return [int(question.id) for question in questions]


@pytest.mark.parametrize('count', [0, 40])
def test_a_step_has_its_games(count):
  questions = games.GameQuestions(seed=1, count=count)
  (evaluation,) = questions.evaluation(16).values()
  assert _ids(evaluation) == list(range(16))
  first = questions.train(3, 8)
  assert first == questions.train(3, 8) != questions.train(4, 8)
  assert first != games.GameQuestions(seed=2, count=count).train(3, 8)
  further = questions.train(3, 8, resample_round=1)
  assert len(set(_ids(first + further))) == 16
  trained = {n for step in range(50) for n in _ids(questions.train(step, 8))}
  assert min(trained) >= 10_000
  assert len(trained) == (count or 400)


def test_too_few_games_are_an_error():
  questions = games.GameQuestions(seed=1, count=4)
  with pytest.raises(ValueError, match='data.games.count=4: a step needs 5'):
    questions.train(0, 5)


def test_a_supervised_start_is_refused_with_one_line():
  questions = games.GameQuestions(seed=0, count=0)
  with pytest.raises(ValueError, match='has no demonstrations to') as error:
    assembly.build_demonstrations(base.get_config(), questions)
  assert '\n' not in str(error.value)
