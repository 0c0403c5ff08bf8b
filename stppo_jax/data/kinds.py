"""The table of question kinds: what each value of `data.name` stands for."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

from stppo_jax.data import arithmetic
from stppo_jax.data import games
from stppo_jax.data import questions
from stppo_jax.data import synthetic_wiki


class Kind(NamedTuple):
  """A kind of questions.

  Attributes:
    load: returns the questions, from the section `data` of a config and the
      seed of the run.
    vocabulary: returns the strings that such questions and their passages
      consist of, from the section; None if their passages have to be read for
      that.
  """

  load: Callable[..., questions.Questions]
  vocabulary: Callable[[Any], Sequence[str]] | None = None


def _synthetic_wiki(data, *, seed: int) -> questions.Questions:
  options = data.synthetic_wiki
  return questions.SyntheticQuestions(
    seed=seed,
    world_seed=options.seed,
    hops=tuple(options.hops),
    world_options={
      'entities_per_type': options.entities_per_type,
      'name_pieces': options.name_pieces,
      'distractors': options.distractors,
    },
  )


def _arithmetic(data, *, seed: int) -> questions.Questions:
  return arithmetic.ArithmeticQuestions(
    seed=seed, max_number=data.arithmetic.max_number
  )


def _games(data, *, seed: int) -> questions.Questions:
  return games.GameQuestions(seed=seed, count=data.games.count)


KINDS: Mapping[str, Kind] = {
  'synthetic_wiki': Kind(
    _synthetic_wiki, lambda data: synthetic_wiki.vocabulary()
  ),
  'jsonl': Kind(questions.load),
  'tfds': Kind(questions.load),
  'arithmetic': Kind(
    _arithmetic, lambda data: arithmetic.vocabulary(data.arithmetic.max_number)
  ),
  # The environment has all words of its games.
  'games': Kind(_games, lambda data: []),
}
