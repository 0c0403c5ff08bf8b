"""Questions whose id is the number of a game that an environment generates."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Protocol

import numpy as np

from stppo_jax import types
from stppo_jax.data import demonstrations
from stppo_jax.data import questions as questions_lib

_DATA_SET = 'games'
_FOR_EVALUATION = 10_000  # games with smaller numbers are for evaluation
_ALL = 2**29  # the number of games for training if the config sets no limit


@dataclasses.dataclass(frozen=True)
class GameQuestions(questions_lib.Questions):
  """Questions without a text, whose id is the number of a game.

  Runs of different seeds train on different games, unless `count` limits the
  number of games. All runs are evaluated on the same games.

  Attributes:
    seed: the seed of the run.
    count: the number of games for training; 0 for new games in every step.
  """

  seed: int
  count: int

  def train(
    self, step: int, count: int, *, resample_round: int = 0
  ) -> list[types.Question]:
    """See `questions.Questions`."""
    needed = (resample_round + 1) * count
    if self.count and needed > self.count:
      raise ValueError(
        f'data.games.count={self.count}: a step needs {needed} different games'
      )
    # All resampling rounds of a step get different games without a saved state:
    # they are slices of one permutation, or of one range of numbers.
    rng = np.random.default_rng((self.seed, step))
    if self.count:
      drawn = rng.permutation(self.count)[needed - count : needed]
    else:
      first = int(rng.integers(_ALL))
      drawn = [(first + n) % _ALL for n in range(needed - count, needed)]
    return [_question(_FOR_EVALUATION + int(number)) for number in drawn]

  def evaluation(self, count: int) -> dict[str, list[types.Question]]:
    """See `questions.Questions`; all questions belong to one data set."""
    numbers = range(min(count, _FOR_EVALUATION))
    return {_DATA_SET: [_question(number) for number in numbers]}

  def passages(self) -> None:
    """Raises ValueError, because these questions have no passages."""
    raise ValueError(
      'data.name=games: its questions have no passages to search, so env.name '
      'must be an environment that plays games, such as textworld'
    )


class Player(Protocol):
  """An environment that can demonstrate how its games are played."""

  def demonstrate(
    self,
    question: types.Question,
    choose: Callable[[str, Sequence[str]], str],
  ) -> list[str]:
    """Plays a game and returns the turns of the player.

    Args:
      question: the question of the game.
      choose: the function that chooses each command. It takes the next command
        of a solution and all possible commands, and returns the command to
        play.
    """
    ...


@dataclasses.dataclass(frozen=True)
class GameDemonstrations(demonstrations.Demonstrations):
  """Demonstrations of the games that the policy is trained on.

  The demonstrator may err in every turn. An error is to play a random command.

  Attributes:
    questions: the questions of the run, with a limited number of games, because
      a new game takes a tenth of a second to make.
    player: the environment of the run.
    noise: the rate of the demonstrator's errors, and their random seed.
  """

  questions: GameQuestions
  player: Player
  noise: demonstrations.Noise

  def batch(self, step: int, count: int) -> list[demonstrations.Demonstration]:
    """See `demonstrations.Demonstrations`."""
    rng, rate = self.noise.of_step(step)

    def choose(right: str, possible: Sequence[str]) -> str:
      if rng.random() >= rate:
        return right
      return possible[int(rng.integers(len(possible)))]

    numbers = rng.integers(self.questions.count, size=count)
    chosen = [_question(_FOR_EVALUATION + int(number)) for number in numbers]
    return [(q, self.player.demonstrate(q, choose)) for q in chosen]


def _question(number: int) -> types.Question:
  return types.Question(
    id=str(number), text='', golden_answers=(), data_set=_DATA_SET
  )
