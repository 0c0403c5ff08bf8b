"""Questions of arithmetic are right, and the same in every call."""

import pytest

from stppo_jax.data import arithmetic
from stppo_jax.data import demonstrations
from stppo_jax.envs import tools


def _questions(**changes):
  return arithmetic.ArithmeticQuestions(
    **({'seed': 3, 'max_number': 9}) | changes
  )


def test_golden_answers_are_the_results():
  (evaluation,) = _questions().evaluation(1000).values()
  for question in [*_questions().train(2, 50), *evaluation]:
    expression = question.text.removeprefix('What is ').removesuffix('?')
    assert question.golden_answers == (str(eval(expression)),)  # noqa: S307
    assert int(question.golden_answers[0]) >= 0


def test_a_step_has_its_questions_and_shares_none_with_evaluation():
  questions = _questions()
  first = questions.train(5, 30)
  assert first == _questions().train(5, 30) != questions.train(6, 30)
  assert first != _questions(seed=4).train(5, 30)
  further = questions.train(5, 30, resample_round=1)
  assert len({q.id for q in first + further}) == 60
  (held_out,) = questions.evaluation(10**6).values()
  assert _questions(seed=4).evaluation(10**6) == {'arithmetic': held_out}
  assert len(questions.evaluation(4)['arithmetic']) == 4
  trained = {q.id for step in range(20) for q in questions.train(step, 100)}
  assert held_out and trained.isdisjoint(q.id for q in held_out)


def test_too_few_questions_are_an_error():
  with pytest.raises(ValueError, match='raise data.arithmetic.max_number'):
    _questions().train(0, 250)


def test_demonstrations_call_answer_and_err_at_the_rate():
  teacher = arithmetic.CalculatorDemonstrations(
    _questions(), demonstrations.Noise(3, 0.5, clean_steps=2)
  )
  assert teacher.batch(1, 40) == teacher.batch(1, 40)
  for step, rate in ((1, 0.0), (2, 0.5)):
    wrong = 0
    for question, turns in teacher.batch(step, 200):
      actions = [tools.parse(turn) for turn in turns]
      asked = question.text.removeprefix('What is ').removesuffix('?')
      right = [
        ('tool', tools.Call('calculator', {'expression': asked})),
        ('answer', question.golden_answers[0]),
      ]
      wrong += actions != right
      assert actions[-1][0] == 'answer' and len(actions) <= 2
    assert abs(wrong / 200 - (1 - (1 - rate) ** 2)) < 0.15
