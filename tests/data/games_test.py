"""Numbers of games are the same in every call and never those of evaluation."""

import pytest

from stppo_jax.configs import base
from stppo_jax.data import demonstrations
from stppo_jax.data import games
from stppo_jax.data import kinds


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


def test_demonstrations_need_a_limited_number_of_games_that_can_be_played():
  config = base.get_config()
  for count, player, expected in (
    (0, _Player(), 'data.games.count=0: must be greater than 0 for demonst'),
    (4, object(), 'env.name=search: has no demonstrations to imitate'),
  ):
    questions = games.GameQuestions(seed=0, count=count)
    with pytest.raises(ValueError, match=expected) as error:
      kinds.demonstrations_of(config, questions, player)
    assert '\n' not in str(error.value)


class _Player:
  """Plays games of ten commands, of which one is right."""

  def demonstrate(self, question, choose):
    del question
    return [choose('right', ['right', *'abcdefghi']) for _ in range(5)]


def test_a_demonstrator_errs_as_often_as_it_should():
  questions = games.GameQuestions(seed=0, count=50)
  teacher = games.GameDemonstrations(
    questions, _Player(), demonstrations.Noise(0, 0.5, clean_steps=2)
  )
  trained = {q.id for q in questions.train(0, 50)}
  for step in (0, 1):
    assert {t for _, turns in teacher.batch(step, 9) for t in turns} == {
      'right'
    }
  drawn = teacher.batch(2, 400)
  assert {question.id for question, _ in drawn} == trained
  right = [turn == 'right' for _, turns in drawn for turn in turns]
  # Of the errors, one in ten is right by chance.
  assert sum(right) / len(right) == pytest.approx(0.55, abs=0.04)
  assert teacher.batch(2, 400) == drawn
  assert teacher.batch(3, 400) != drawn
