"""Noisy demonstrations of searching in the synthetic encyclopedia.

At each decision the demonstrator errs with probability p: whether to search
at all, what to ask, which fact of the passage to believe. The supervised start
is therefore a mixture of good and bad habits, which is what reinforcement
learning is given to sort out.
"""

import numpy as np

from stppo_jax.data import synthetic_wiki


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
    error_rate: probability of an error at each decision (three a hop).
    think_words: free words at the head of each <think>.
  """
  turns, entity = [], world.entities[chain.start]
  names = list(world.entities)
  for relation in chain.relations:
    if rng.random() < error_rate:  # answers what it has not looked up
      return turns + [_answer(names[rng.integers(len(names))], rng, think_words)]
    query = entity.name
    believed = relation
    if rng.random() < error_rate:  # asks for half a name: finds nothing
      query = query[:3]
      entity = world.entities[names[rng.integers(len(names))]]
    turns.append(
        f'<think>{_filler(rng, think_words)} find {relation}</think>'
        f'<search> {query}</search>'
    )
    if rng.random() < error_rate:  # believes another fact of the passage
      believed = list(entity.facts)[rng.integers(len(entity.facts))]
    if believed not in entity.facts:
      believed = next(iter(entity.facts))
    entity = world.entities[entity.facts[believed]]
  return turns + [_answer(entity.name, rng, think_words)]


def _answer(name: str, rng: np.random.Generator, think_words: int) -> str:
  filler = _filler(rng, think_words)
  return f'<think>{filler} done</think><answer> {name}</answer>'


def _filler(rng: np.random.Generator, count: int) -> str:
  return ''.join(rng.choice(synthetic_wiki.FILLER_WORDS, size=count))
