"""The table of question kinds: what each value of `data.name` stands for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from stppo_jax.data import arithmetic
from stppo_jax.data import demonstrations
from stppo_jax.data import games
from stppo_jax.data import questions as questions_lib
from stppo_jax.data import synthetic_wiki


class Kind(NamedTuple):
  """A kind of questions.

  Attributes:
    load: the function that takes the section `data` of a config and the seed of
      the run, and returns the questions.
    vocabulary: the function that takes the section `data` and returns the
      strings of which the questions and their passages consist; None if these
      strings have to be read from the passages.
  """

  load: Callable[..., questions_lib.Questions]
  vocabulary: Callable[[Any], Sequence[str]] | None = None


def _synthetic_wiki(data, *, seed: int) -> questions_lib.Questions:
  options = data.synthetic_wiki
  return questions_lib.SyntheticQuestions(
    seed=seed,
    world_seed=options.seed,
    hops=tuple(options.hops),
    world_options={
      'entities_per_type': options.entities_per_type,
      'name_pieces': options.name_pieces,
      'distractors': options.distractors,
    },
  )


def _arithmetic(data, *, seed: int) -> questions_lib.Questions:
  return arithmetic.ArithmeticQuestions(seed, data.arithmetic.max_number)


def _games(data, *, seed: int) -> questions_lib.Questions:
  return games.GameQuestions(seed=seed, count=data.games.count)


KINDS: Mapping[str, Kind] = {
  'synthetic_wiki': Kind(
    _synthetic_wiki, lambda data: synthetic_wiki.vocabulary()
  ),
  'jsonl': Kind(questions_lib.load),
  'tfds': Kind(questions_lib.load),
  'arithmetic': Kind(
    _arithmetic, lambda data: arithmetic.vocabulary(data.arithmetic.max_number)
  ),
  # The words of a game come from its environment, so the questions add none.
  'games': Kind(_games, lambda data: []),
}

# The argument `count` of `Questions.training_sample`. At least one question of
# the sample must have a gold passage, which the demonstrations can quote.
_SAMPLE = 256


def demonstrations_of(
  config, questions: questions_lib.Questions, environment: Any
) -> demonstrations.Demonstrations:
  """Returns the demonstrations that the supervised start imitates.

  Args:
    config: the config of the run.
    questions: the questions of the run.
    environment: the environment of the run; a `games.Player` if it can
      demonstrate its games.

  Raises:
    ValueError: if the environment or the questions have no demonstrations; the
      message is one line.
  """
  sft = config.sft
  if sft.demonstrations:
    return demonstrations.StoredDemonstrations(
      sft.demonstrations, seed=config.seed
    )
  noise = demonstrations.Noise(
    config.seed, sft.error_rate, sft.clean_one_hop_steps + sft.clean_steps
  )
  if isinstance(questions, games.GameQuestions):
    if not hasattr(environment, 'demonstrate'):
      raise ValueError(
        f'env.name={config.env.name}: has no demonstrations to imitate; start '
        'from a model that can follow the prompt (model.path), without '
        'sft.before_training'
      )
    if not questions.count:
      raise ValueError(
        'data.games.count=0: must be greater than 0 for demonstrations, '
        'because a new game takes long to make'
      )
    return games.GameDemonstrations(questions, environment, noise)
  if isinstance(questions, questions_lib.SyntheticQuestions):
    return demonstrations.SyntheticDemonstrations(
      questions=questions,
      noise=noise,
      one_hop_steps=sft.clean_one_hop_steps,
      think_words=config.data.synthetic_wiki.think_words,
      error_turns=config.data.synthetic_wiki.error_turns,
      repair_rate=config.data.synthetic_wiki.repair_rate,
    )
  if isinstance(questions, arithmetic.ArithmeticQuestions):
    return arithmetic.CalculatorDemonstrations(questions, noise)
  # Passages can be read here only from the file data.corpus. Without this file,
  # nothing can be quoted, even if a retrieval server has the passages.
  found = (questions.passages() or ()) if config.data.corpus else ()
  passages = {passage.id: passage for passage in found}
  if sft.quote_words and not any(
    name in passages
    for question in questions.training_sample(_SAMPLE)
    for name in question.gold_passages
  ):
    raise ValueError(
      f'sft.quote_words={sft.quote_words}: no question has gold_pids that are '
      'in data.corpus, so there is no passage to quote; add gold_pids, or set '
      'sft.quote_words=0'
    )
  return demonstrations.PassageDemonstrations(
    questions=questions,
    passages=passages,
    noise=noise,
    max_searches=config.env.max_turns,
    quote_words=sft.quote_words,
  )
