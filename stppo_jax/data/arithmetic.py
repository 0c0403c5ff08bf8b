"""Questions of mental arithmetic, and demonstrations that use a calculator."""

import dataclasses
import operator
import zlib

import numpy as np

from stppo_jax import types
from stppo_jax.data import demonstrations
from stppo_jax.data import questions as questions_lib

_OPERATIONS = {'+': operator.add, '-': operator.sub, '*': operator.mul}
_DATA_SET = 'arithmetic'
_QUESTION = ('What is ', '?')
_EVALUATION_SHARE = 8  # one expression in eight is for evaluation
_CALL = (
  '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}'
  '</tool_call>'
)
# Every random seed ends in a number for its purpose, so that no two purposes
# draw the same random numbers. `_EVALUATION` is the whole seed of the order of
# the evaluation questions, so that this order is the same in all runs.
_TRAINING, _DEMONSTRATIONS = 1, 2
_EVALUATION = (0, 3)

# The errors that the demonstrator may make in its first turn.
_ERRORS = ('no_call', 'other_expression')


@dataclasses.dataclass(frozen=True)
class ArithmeticQuestions(questions_lib.Questions):
  """Questions with two numbers and one operation; no result is negative.

  A hash of the expression decides whether its question is for training or for
  evaluation.

  Attributes:
    seed: the seed of the run.
    max_number: the largest number in a question.
  """

  seed: int
  max_number: int

  def train(
    self, step: int, count: int, *, resample_round: int = 0
  ) -> list[types.Question]:
    """See `questions.Questions`."""
    # All resampling rounds of a step are slices of one permutation, so no two
    # rounds share a question.
    expressions = self._draw(
      (self.seed, step, _TRAINING), (resample_round + 1) * count
    )
    return [_question(e) for e in expressions[resample_round * count :]]

  def evaluation(self, count: int) -> dict[str, list[types.Question]]:
    """See `questions.Questions`; all questions belong to one data set."""
    order = np.random.default_rng(_EVALUATION)
    chosen = [e for e in self._expressions() if _is_for_evaluation(e)]
    order.shuffle(chosen)
    return {_DATA_SET: [_question(e) for e in chosen[:count]]}

  def passages(self) -> None:
    """Raises ValueError, because these questions have no passages."""
    raise ValueError(
      'data.name=arithmetic: its questions have no passages to search, so '
      'env.name must be an environment that does not search, such as tools'
    )

  def demonstrated(self, step: int, count: int) -> list[str]:
    """Returns the expressions that the demonstrations of a step ask about."""
    return self._draw((self.seed, step, _DEMONSTRATIONS), count)

  def _expressions(self) -> list[str]:
    numbers = range(self.max_number + 1)
    return [
      f'{a} {sign} {b}'
      for sign in _OPERATIONS
      for a in numbers
      for b in numbers
      if sign != '-' or a >= b
    ]

  def _draw(self, key: tuple[int, ...], count: int) -> list[str]:
    """Returns `count` different training expressions, with `key` as seed."""
    chosen = [e for e in self._expressions() if not _is_for_evaluation(e)]
    if count > len(chosen):
      raise ValueError(
        f'{count} questions are needed, but there are only {len(chosen)} '
        'different questions; raise data.arithmetic.max_number'
      )
    order = np.random.default_rng(key).permutation(len(chosen))
    return [chosen[index] for index in order[:count]]


@dataclasses.dataclass(frozen=True)
class CalculatorDemonstrations(demonstrations.Demonstrations):
  """Demonstrations that call the calculator and answer with its result.

  The demonstrator may err in each of its two turns. If it errs in the first
  turn, it guesses the answer without a call, or it replaces the second number
  of the question. If it errs in the second turn, it answers with the first
  number of the question instead of the result.

  Attributes:
    questions: the questions of the run.
    noise: the rate of the demonstrator's errors, and their random seed.
  """

  questions: ArithmeticQuestions
  noise: demonstrations.Noise

  def batch(self, step: int, count: int) -> list[demonstrations.Demonstration]:
    """See `demonstrations.Demonstrations`."""
    rng, rate = self.noise.of_step(step)
    return [
      (_question(expression), self._turns(expression, rng, rate))
      for expression in self.questions.demonstrated(step, count)
    ]

  def _turns(
    self, expression: str, rng: np.random.Generator, rate: float
  ) -> list[str]:
    """Returns the turns that the demonstrator writes for an expression."""
    first, sign, _ = expression.split()
    if rng.random() < rate:
      error = _ERRORS[rng.integers(len(_ERRORS))]
      if error == 'no_call':
        guess = rng.integers(self.questions.max_number**2 + 1)
        return [f'<answer>{guess}</answer>']
      # `other` is at most the first number, so that no difference is negative.
      other = rng.integers(int(first) + 1)
      expression = f'{first} {sign} {other}'
    answer = first if rng.random() < rate else _result(expression)
    return [_CALL % expression, f'<answer>{answer}</answer>']


def vocabulary(max_number: int) -> list[str]:
  """Returns the strings that get a token of their own in a new tokenizer.

  Every number from 0 to the largest result is one token. So even a small model
  can copy a number, because it has to generate only one token.
  """
  signs = [f' {sign} ' for sign in _OPERATIONS]
  return [*_QUESTION, *signs, *map(str, range(max_number**2 + 1))]


def _question(expression: str) -> types.Question:
  before, after = _QUESTION
  return types.Question(
    id=expression,
    text=f'{before}{expression}{after}',
    golden_answers=(_result(expression),),
    data_set=_DATA_SET,
  )


def _result(expression: str) -> str:
  first, sign, second = expression.split()
  return str(_OPERATIONS[sign](int(first), int(second)))


def _is_for_evaluation(expression: str) -> bool:
  # Python's `hash` of a string differs between processes. The split must be the
  # same in every run, or evaluation questions would be trained on.
  return zlib.crc32(expression.encode()) % _EVALUATION_SHARE == 0
