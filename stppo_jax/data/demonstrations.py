"""Noisy demonstrations of searching, for the supervised start.

At each decision the demonstrator errs with probability p: what to do (it
answers without searching, or asks for half a name) and what to believe (it
takes another fact of the passage). The start is therefore a mixture of good
and bad habits, which is what reinforcement learning is given to sort out.
"""

import dataclasses
from typing import Protocol

import numpy as np

from stppo_jax import types
from stppo_jax.data import questions as questions_lib
from stppo_jax.data import synthetic_wiki

Demonstration = tuple[types.Question, list[str]]


class Demonstrations(Protocol):
  """Dialogues to imitate: a question and the turns it should lead to."""

  def batch(self, step: int, count: int) -> list[Demonstration]:
    """`count` demonstrations of that step, always the same ones."""
    ...


@dataclasses.dataclass(frozen=True)
class SyntheticDemonstrations:
  """Demonstrations in synthetic worlds that no training step uses.

  Attributes:
    questions: of the same encyclopedia.
    error_rate: probability of an error at each decision.
    clean_one_hop_steps: first steps, with one hop and no errors: copying is
      learned there.
    clean_steps: steps after those, with all hops and no errors.
    think_words: free words at the head of each <think>.
  """

  questions: questions_lib.SyntheticQuestions
  error_rate: float
  clean_one_hop_steps: int
  clean_steps: int
  think_words: int

  def batch(self, step: int, count: int) -> list[Demonstration]:
    """See `Demonstrations`."""
    one_hop = step < self.clean_one_hop_steps
    clean = step < self.clean_one_hop_steps + self.clean_steps
    world, chains = self.questions.demonstration_chains(
      step, count, hops=(1,) if one_hop else self.questions.hops
    )
    rng = np.random.default_rng((self.questions.seed, step))
    rate = 0.0 if clean else self.error_rate
    return [
      (
        chain.question,
        demonstrate(
          world, chain, rng, error_rate=rate, think_words=self.think_words
        ),
      )
      for chain in chains
    ]


@dataclasses.dataclass(frozen=True)
class LookupDemonstrations:
  """Asks the search engine the question itself, then gives a golden answer.

  All that files allow: no facts are known beyond the answer. It teaches the
  form of the dialogue, not how to read.

  Attributes:
    questions: to take them from.
    seed: of the errors.
    error_rate: probability of answering without a search.
  """

  questions: questions_lib.Questions
  seed: int
  error_rate: float

  def batch(self, step: int, count: int) -> list[Demonstration]:
    """See `Demonstrations`."""
    rng = np.random.default_rng((self.seed, step))
    result = []
    for question in self.questions.train(step, count):
      turns = []
      if rng.random() >= self.error_rate:
        turns.append(
          f'<think> I look it up. </think><search> {question.text} </search>'
        )
      turns.append(
        '<think> I know it now. </think>'
        f'<answer> {question.golden_answers[0]} </answer>'
      )
      result.append((question, turns))
    return result


def demonstrate(
  world: synthetic_wiki.World,
  chain: synthetic_wiki.Chain,
  rng: np.random.Generator,
  *,
  error_rate: float,
  think_words: int = 0,
) -> list[str]:
  """The turns of one dialogue, each ending in its closing tag.

  Args:
    world: the world the question is about.
    chain: the question and the relations that lead to its answer.
    rng: source of the errors.
    error_rate: probability of an error at each decision (two a hop).
    think_words: free words at the head of each <think>.
  """
  turns, entity = [], world.entities[chain.start]
  answer = lambda: _answer(entity.name, rng, think_words)
  for relation in chain.relations:
    # What to do: search for the name; or answer unread; or search for half of
    # the name, find nothing, and give up.
    errs = rng.random() < error_rate
    if errs and rng.random() < 0.5:
      return [*turns, answer()]
    query = synthetic_wiki.opening_of(entity.name) if errs else entity.name
    turns.append(
      f'<think>{_filler(rng, think_words)} find {relation}</think>'
      f'<search> {query}</search>'
    )
    if errs:
      return [*turns, answer()]
    # What to believe: the fact; or another one of the passage, also where a
    # wrong entity has no such relation.
    if relation not in entity.facts or rng.random() < error_rate:
      others = [r for r in entity.facts if r != relation]
      relation = others[rng.integers(len(others))]
    entity = world.entities[entity.facts[relation]]
  return [*turns, answer()]


def _answer(name: str, rng: np.random.Generator, think_words: int) -> str:
  filler = _filler(rng, think_words)
  return f'<think>{filler} done</think><answer> {name}</answer>'


def _filler(rng: np.random.Generator, count: int) -> str:
  return ''.join(rng.choice(synthetic_wiki.FILLER_WORDS, size=count))
