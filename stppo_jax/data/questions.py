"""Which questions a step asks: a function of (seed, step), nothing to save."""

from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Protocol

import numpy as np

from stppo_jax import types
from stppo_jax.data import readers
from stppo_jax.data import synthetic_wiki
from stppo_jax.retrieval import corpus as corpus_lib

# Training worlds of different runs lie this far apart.
_WORLDS_PER_RUN = 1_000_000


class Questions(Protocol):
  """Training questions by step, evaluation questions by data set."""

  def train(
    self, step: int, count: int, *, resample_round: int = 0
  ) -> list[types.Question]:
    """`count` different questions of that step, always the same ones.

    Args:
      step: of the run.
      count: questions.
      resample_round: 0 asks for the questions that the step starts with, n for
        the n-th `count` questions that replace some of them. No two rounds of
        a step share a question.

    Raises:
      ValueError: there are not so many questions.
    """
    ...

  def evaluation(self, count: int) -> dict[str, list[types.Question]]:
    """At most `count` fixed questions of each data set."""
    ...

  def passages(self) -> Sequence[types.Passage] | None:
    """The corpus an embedded server offers; None if it has none of its own."""
    ...

  def world_passages(self, world: int) -> Sequence[types.Passage]:
    """The passages of a world, for questions that live in one."""
    ...


@dataclasses.dataclass(frozen=True)
class SyntheticQuestions:
  """A new synthetic world every step; world 0 is for evaluation.

  The encyclopedia is the same for every run seed: evaluation questions can be
  compared between runs, training worlds differ.

  Attributes:
    seed: of the run.
    world_seed: of the encyclopedia.
    hops: numbers of hops, in turn.
    world_options: of `synthetic_wiki.make_world`.
  """

  seed: int
  world_seed: int
  hops: tuple[int, ...]
  world_options: dict[str, int]

  def train(
    self, step: int, count: int, *, resample_round: int = 0
  ) -> list[types.Question]:
    """See `Questions`; further ones are of the same world."""
    world = self._world(_index(self.seed + 1, step))
    chains = world.chains((resample_round + 1) * count, hops=self.hops, seed=0)
    return [chain.question for chain in chains[resample_round * count :]]

  def demonstration_chains(
    self, step: int, count: int, *, hops: tuple[int, ...]
  ) -> tuple[synthetic_wiki.World, list[synthetic_wiki.Chain]]:
    """A world that no training step uses, with solved questions."""
    world = self._world(_index(0, step))
    return world, world.chains(count, hops=hops, seed=0)

  def evaluation(self, count: int) -> dict[str, list[types.Question]]:
    """See `Questions`: one data set per number of hops."""
    world = self._world(0)
    result = {}
    for hops in self.hops:
      chains = world.chains(count, hops=(hops,), seed=0)
      name = chains[0].question.data_set
      result[name] = [chain.question for chain in chains]
    return result

  def passages(self) -> None:
    """See `Questions`: every passage belongs to a world."""
    return None

  def world_passages(self, world: int) -> list[types.Passage]:
    """See `Questions`."""
    return self._world(world).passages()

  def _world(self, index: int) -> synthetic_wiki.World:
    return synthetic_wiki.make_world(
      self.world_seed, index, **self.world_options
    )


def _index(run: int, step: int) -> int:
  if not 0 <= step < _WORLDS_PER_RUN - synthetic_wiki.NUM_EVALUATION_WORLDS:
    raise ValueError(f'step {step}: a run has at most {_WORLDS_PER_RUN} worlds')
  return _WORLDS_PER_RUN * run + synthetic_wiki.NUM_EVALUATION_WORLDS + step


class FileQuestions:
  """Questions and passages from JSONL files.

  Every epoch is a new permutation of the training questions; a step takes the
  next `count` of them. Its further questions are a random sample of all others,
  which the epoch asks all the same.

  Args:
    seed: of the permutations.
    train: file of training questions.
    evaluation: file of evaluation questions; None = no evaluation.
    corpus: file of passages.

  Raises:
    FileNotFoundError, ValueError: a missing or malformed file, in one line.
  """

  def __init__(
    self,
    *,
    seed: int,
    train: pathlib.Path,
    evaluation: pathlib.Path | None,
    corpus: pathlib.Path,
  ):
    self._seed = seed
    self._train = readers.read_questions(train)
    self._evaluation = readers.read_questions(evaluation) if evaluation else []
    self._corpus = corpus

  def train(
    self, step: int, count: int, *, resample_round: int = 0
  ) -> list[types.Question]:
    """See `Questions`."""
    total = len(self._train)
    if resample_round and (resample_round + 1) * count > total:
      raise ValueError(
        f'{total} training questions are fewer than {resample_round + 1} times '
        f'{count}, which a step may ask with its resampled groups'
      )
    chosen = self._indices_of_step(step, count)
    if resample_round:
      asked = set(chosen)
      order = np.random.default_rng((self._seed, step, 1)).permutation(total)
      rest = [index for index in order if index not in asked]
      chosen = rest[(resample_round - 1) * count : resample_round * count]
    return [self._train[index] for index in chosen]

  def _indices_of_step(self, step: int, count: int) -> list[int]:
    """Indices of the questions that are due in the epochs' order."""
    total = len(self._train)
    chosen = []
    for place in range(step * count, (step + 1) * count):
      epoch, index = divmod(place, total)
      if index == 0 or not chosen:
        order = np.random.default_rng((self._seed, epoch)).permutation(total)
      chosen.append(int(order[index]))
    return chosen

  def evaluation(self, count: int) -> dict[str, list[types.Question]]:
    """See `Questions`: a fixed sample of each data set in the file."""
    order = np.random.default_rng(0).permutation(len(self._evaluation))
    result = {}
    for index in order:
      question = self._evaluation[index]
      kept = result.setdefault(question.data_set, [])
      if len(kept) < count:
        kept.append(question)
    return result

  def passages(self) -> list[types.Passage]:
    """See `Questions`."""
    return corpus_lib.read_corpus(self._corpus)

  def world_passages(self, world: int) -> list[types.Passage]:
    """See `Questions`: files hold no worlds."""
    raise LookupError(f'no world {world}: the corpus is a file')
