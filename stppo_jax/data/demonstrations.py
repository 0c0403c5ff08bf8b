"""Noisy demonstrations of searching, for the supervised start of a run.

The demonstrator may err in every turn: it answers without searching, searches
for half a name, or takes a wrong fact from the previous passage. A policy that
imitates the demonstrator learns good and bad habits. So reinforcement learning
finds good and bad trajectories to compare.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import os
from typing import Any, NamedTuple, Protocol

import numpy as np

from stppo_jax import text
from stppo_jax import types
from stppo_jax.data import mixtures
from stppo_jax.data import questions as questions_lib
from stppo_jax.data import readers
from stppo_jax.data import synthetic_wiki
from stppo_jax.data import tables

Demonstration = tuple[types.Question, list[str]]

# The errors of a turn that searches. In the first turn, the error `wrong_fact`
# is impossible, because no passage has been read yet.
_SEARCH_ERRORS = ('no_search', 'partial_query', 'wrong_fact')
# The least and the largest number of words of an excerpt. An excerpt replaces a
# question, so it has about as many words as a question.
_EXCERPT_WORDS = (5, 20)
_RANDOM_FILLER = 1 / 8  # the share of filler words that are drawn at random


class Demonstrations(Protocol):
  """Gives questions, each with the turns that the policy should imitate."""

  def batch(self, step: int, count: int) -> list[Demonstration]:
    """Returns the `count` demonstrations of a step, the same in every call."""
    ...


@dataclasses.dataclass(frozen=True)
class Noise:
  """Says how often a demonstrator errs, and in which steps.

  Attributes:
    seed: the seed of the random errors.
    error_rate: the probability of an error at each decision.
    clean_steps: the number of steps at the start that have no errors.
  """

  seed: int
  error_rate: float
  clean_steps: int = 0

  def of_step(self, step: int) -> tuple[np.random.Generator, float]:
    """Returns the random generator and the error probability of a step."""
    rate = 0.0 if step < self.clean_steps else self.error_rate
    return np.random.default_rng((self.seed, step)), rate


@dataclasses.dataclass(frozen=True)
class SyntheticDemonstrations:
  """Demonstrations in synthetic worlds that no training step uses.

  Attributes:
    questions: the questions of the run. The demonstrations are about worlds of
      the same encyclopedia.
    noise: the rate of the demonstrator's errors, and their random seed.
    one_hop_steps: the number of steps at the start whose questions have one
      hop, so that the policy first learns to copy names.
    think_words, error_turns, repair_rate: see `demonstrate`.
  """

  questions: questions_lib.SyntheticQuestions
  noise: Noise
  one_hop_steps: int
  think_words: int = 0
  error_turns: int = 0
  repair_rate: float = 0.0

  def batch(self, step: int, count: int) -> list[Demonstration]:
    """See `Demonstrations`."""
    one_hop = step < self.one_hop_steps
    world, chains = self.questions.demonstration_chains(
      step, count, hops=(1,) if one_hop else self.questions.hops
    )
    rng, rate = self.noise.of_step(step)
    return [
      (
        chain.question,
        demonstrate(
          world,
          chain,
          rng,
          error_rate=rate,
          think_words=self.think_words,
          error_turns=self.error_turns,
          repair_rate=self.repair_rate,
        ),
      )
      for chain in chains
    ]


@dataclasses.dataclass(frozen=True)
class PassageDemonstrations:
  """Demonstrations that search for the titles of gold passages, then answer.

  A title becomes a query only if one of its words occurs in the question or in
  an earlier gold passage, because the policy could guess no other title. If
  there is no such title, the question itself is the query. At each decision the
  demonstrator may err: it does not search, searches for the first word of the
  query only, or misreads the passage. After an error, the demonstrator gives
  the answer of another question.

  If a small model learns from these demonstrations alone, it learns to copy
  text long before it learns to read. If `quote_words` is not 0, the
  demonstrator therefore copies: its query is the question, and its answer
  quotes the beginning of the gold passage. Such a demonstrator never misreads.
  In the steps without errors, the text of about half of the questions is
  replaced by an excerpt of the gold passage. Without the excerpts, the model
  would learn a few hundred questions by heart, and could copy no other question
  into a query.

  Attributes:
    questions: the questions of the run.
    passages: the passages by id; empty if only a server has the passages.
    noise: the rate of the demonstrator's errors, and their random seed.
    max_searches: the largest number of searches in a dialogue.
    quote_words: the largest number of words that an answer quotes. For each
      answer, a number is drawn from 1 to `quote_words`. If `quote_words` is 0,
      the answer is a golden answer.
  """

  questions: questions_lib.Questions
  passages: Mapping[str, types.Passage]
  noise: Noise
  max_searches: int
  quote_words: int

  def batch(self, step: int, count: int) -> list[Demonstration]:
    """See `Demonstrations`."""
    rng, rate = self.noise.of_step(step)
    questions = self.questions.train(step, count)
    # After an error, the demonstrator gives the golden answer of the next
    # question of the batch. This guess looks like an answer, and is almost
    # always wrong.
    guesses = [*questions[1:], *questions[:1]]
    if self.quote_words and not rate:
      questions = [self._excerpt(question, rng) for question in questions]
    return [
      (question, self._turns(question, guess, rng, rate))
      for question, guess in zip(questions, guesses)
    ]

  def _turns(
    self,
    question: types.Question,
    guess: types.Question,
    rng: np.random.Generator,
    rate: float,
  ) -> list[str]:
    """Returns the turns of one dialogue.

    Args:
      question: the question of the dialogue.
      guess: the question whose golden answer is given after an error.
      rng: the random generator of the errors.
      rate: the probability of an error at each decision.
    """
    turns, answer = [], self._answer(question, rng)
    for query in self._queries(question)[: self.max_searches]:
      error = _draw(rng, rate, _SEARCH_ERRORS[:2])
      if error == 'partial_query':
        query = query.split()[0]
      if error != 'no_search':
        turns.append(
          '<think> I look it up. </think>'
          f'<search> {text.neutralise_tags(query)} </search>'
        )
      if error:
        answer = guess.golden_answers[0]
        break
    else:
      if not self.quote_words and _draw(rng, rate, ('wrong_fact',)):
        answer = guess.golden_answers[0]
    turns.append(
      '<think> I know it now. </think>'
      f'<answer> {text.neutralise_tags(answer)} </answer>'
    )
    return turns

  def _excerpt(
    self, question: types.Question, rng: np.random.Generator
  ) -> types.Question:
    """Returns the question, in half of the cases with an excerpt as its text.

    The excerpt consists of consecutive words of the first gold passage.
    """
    gold = self._gold(question)
    if not gold or rng.random() < 0.5:
      return question
    words = gold[0].text.split()
    count = rng.integers(*_EXCERPT_WORDS, endpoint=True)
    start = rng.integers(max(0, len(words) - count), endpoint=True)
    excerpt = ' '.join(words[start : start + count])
    return dataclasses.replace(question, text=excerpt or question.text)

  def _answer(self, question: types.Question, rng: np.random.Generator) -> str:
    """Returns a golden answer, or the first words of a gold passage.

    The passage is quoted if `quote_words` is not 0 and the question has a gold
    passage.
    """
    gold = self._gold(question)
    if not (self.quote_words and gold):
      return question.golden_answers[0]
    count = rng.integers(1, self.quote_words, endpoint=True)
    return ' '.join(gold[0].text.split()[:count])

  def _queries(self, question: types.Question) -> list[str]:
    """Returns the queries: titles of gold passages, or the question itself."""
    queries, read = [], text.normalise(question.text).split()
    for passage in [] if self.quote_words else self._gold(question):
      if not set(text.normalise(passage.title).split()).isdisjoint(read):
        queries.append(passage.title)
        read += text.normalise(f'{passage.title} {passage.text}').split()
    return list(dict.fromkeys(queries)) or [question.text]

  def _gold(self, question: types.Question) -> list[types.Passage]:
    """Returns the gold passages of a question that are in `passages`."""
    found = map(self.passages.get, question.gold_passages)
    return [passage for passage in found if passage]


class StoredDemonstrations:
  """Demonstrations from a file of questions with a field `turns`."""

  def __init__(self, path: str | os.PathLike[str], *, seed: int):
    """Reads the file.

    Args:
      path: a file in JSON Lines or another format that `tables.read` reads. The
        field `turns` of a row is a list of texts, each with its closing tag.
      seed: the seed of the order of the demonstrations.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if a row is no question with turns; the message names the
        line.
    """
    self._seed = seed
    self._rows = tables.read(path, _stored, noun='demonstrations')

  def batch(self, step: int, count: int) -> list[Demonstration]:
    """See `Demonstrations`; an epoch uses every row of the file once."""
    chosen = mixtures.epochs(
      (self._seed,), len(self._rows), step * count, count
    )
    return [(self._rows[i].question, self._rows[i].turns) for i in chosen]


class _Stored(NamedTuple):
  """A row of a file of demonstrations; its id is the number of the row."""

  id: str
  question: types.Question
  turns: list[str]


def _stored(fields: Any, number: int) -> _Stored:
  """Returns the demonstration of a row."""
  if isinstance(fields, Mapping):
    fields = {'id': str(number), 'dataset': 'demonstrations', **fields}
  question = readers.parse_question(fields)
  turns = fields.get('turns')
  if not turns or not readers.is_strings(turns):
    raise ValueError('"turns": expected a list of one or more texts')
  return _Stored(str(number), question, turns)


def demonstrate(
  world: synthetic_wiki.World,
  chain: synthetic_wiki.Chain,
  rng: np.random.Generator,
  *,
  error_rate: float,
  think_words: int = 0,
  error_turns: int = 0,
  repair_rate: float = 0.0,
) -> list[str]:
  """Returns the turns of one dialogue, each with its closing tag.

  Args:
    world: the world of the question.
    chain: the question and the relations that lead to its answer.
    rng: the random generator of errors and filler words.
    error_rate: the probability of an error in each turn.
    think_words: the number of filler words at the start of each <think>.
    error_turns: the number of turns at the start that may have an error; 0 if
      all turns may have one.
    repair_rate: the probability of a second search, for the whole name, after a
      search for half of the name has found nothing.
  """
  last = error_turns or len(chain.relations) + 1
  rate = lambda turn: error_rate if turn < last else 0.0
  entity = before = world.entities[chain.start]
  turns = []
  answer = lambda: _answer(entity.name, rng, think_words)
  for hop, relation in enumerate(chain.relations):
    error = _draw(rng, rate(hop), _SEARCH_ERRORS[: 3 if hop else 2])
    if error == 'wrong_fact':
      entity = _misread(world, rng, before, entity)
    if error == 'no_search' or relation not in entity.facts:
      return [*turns, answer()]
    partial = error == 'partial_query'
    queries = [entity.name]
    if partial:  # a search for half a name finds nothing
      queries = [synthetic_wiki.first_piece(entity.name)]
      if repair_rate and rng.random() < repair_rate:
        queries.append(entity.name)
    turns += [
      f'<think>{_filler(rng, think_words)} find {relation}</think>'
      f'<search> {query}</search>'
      for query in queries
    ]
    if partial and len(queries) == 1:  # the demonstrator gives up
      return [*turns, answer()]
    before, entity = entity, world.entities[entity.facts[relation]]
  if _draw(rng, rate(len(chain.relations)), ('wrong_fact',)):
    entity = _misread(world, rng, before, entity)
  return [*turns, answer()]


def _draw(
  rng: np.random.Generator, error_rate: float, errors: Sequence[str]
) -> str | None:
  """Returns one of the errors with probability `error_rate`, else None."""
  if rng.random() >= error_rate:
    return None
  return errors[int(rng.integers(len(errors)))]


def _misread(
  world: synthetic_wiki.World,
  rng: np.random.Generator,
  source: synthetic_wiki.Entity,
  right: synthetic_wiki.Entity,
) -> synthetic_wiki.Entity:
  """Returns a wrong entity that the passage about `source` mentions."""
  others = [name for name in source.facts.values() if name != right.name]
  return world.entities[others[rng.integers(len(others))]]


def _answer(name: str, rng: np.random.Generator, think_words: int) -> str:
  """Returns the turn that answers with a name."""
  filler = _filler(rng, think_words)
  return f'<think>{filler} done</think><answer> {name}</answer>'


def _filler(rng: np.random.Generator, count: int) -> str:
  """Returns `count` filler words.

  Most words follow the previous word in a fixed order, and some are drawn at
  random, because in real text, too, most tokens are easy to predict.
  """
  words = synthetic_wiki.FILLER_WORDS
  place, filler = 0, ''
  for number in range(count):
    if number == 0 or rng.random() < _RANDOM_FILLER:
      place = int(rng.integers(len(words)))
    filler += words[place]
    place = (place + 1) % len(words)
  return filler
