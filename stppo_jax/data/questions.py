"""The questions of each step, as a function of the seed and the step.

Because of this, a resumed run has the same questions although nothing about
them is saved.
"""

from collections.abc import Sequence
import dataclasses
import functools
import pathlib
from typing import Any, Protocol

import numpy as np

from stppo_jax import buckets
from stppo_jax import types
from stppo_jax.data import mixtures
from stppo_jax.data import passages as passages_lib
from stppo_jax.data import readers
from stppo_jax.data import synthetic_wiki

# The training worlds of two runs with adjacent seeds have indices this far
# apart, so that no two runs share a world.
_WORLDS_PER_RUN = 1_000_000
# The most training questions of files that are checked before a run.
_CHECKED = 4096


class Questions(Protocol):
  """A data set: training questions, evaluation questions and passages."""

  def training_sample(self, count: int) -> Sequence[types.Question]:
    """Returns training questions for a check before the run.

    A generator returns `count` questions. Files ignore `count` and return a
    sample of all their questions.
    """
    return self.train(0, count)

  def train(
    self, step: int, count: int, *, resample_round: int = 0
  ) -> list[types.Question]:
    """Returns `count` different questions, the same in every call.

    Args:
      step: the number of the step.
      count: the number of questions.
      resample_round: 0 for the questions that the step starts with, n for those
        of the n-th round of replacements. No two rounds of a step share a
        question.

    Raises:
      ValueError: if there are too few questions.
    """
    ...

  def evaluation(self, count: int) -> dict[str, list[types.Question]]:
    """Returns at most `count` questions by data set, always the same ones."""
    ...

  def passages(self) -> Sequence[types.Passage] | None:
    """Returns the corpus of all questions; None if each world has its own."""
    ...

  def world_passages(self, world: int) -> Sequence[types.Passage]:
    """Returns the passages of a world.

    Raises:
      LookupError: if there is no such world, or the questions have none.
    """
    raise LookupError(f'no world {world}: these questions have none')


@dataclasses.dataclass(frozen=True)
class SyntheticQuestions(Questions):
  """Questions on a new synthetic world in every step.

  World 0 is for evaluation. The encyclopedia does not depend on the seed of the
  run: runs of different seeds train on different worlds and are evaluated on
  the same questions.

  Attributes:
    seed: the seed of the run.
    world_seed: the seed of the encyclopedia.
    hops: the numbers of hops, which the questions take in turn.
    world_options: the options of `synthetic_wiki.make_world`.
  """

  seed: int
  world_seed: int
  hops: tuple[int, ...]
  world_options: dict[str, int]

  def train(
    self, step: int, count: int, *, resample_round: int = 0
  ) -> list[types.Question]:
    """See `Questions`; all rounds of a step are about the same world."""
    # A round is the next part of one list of chains, so no two share a
    # question.
    world = self._world(_index(self.seed + 1, step))
    chains = world.chains((resample_round + 1) * count, hops=self.hops)
    return [chain.question for chain in chains[resample_round * count :]]

  def demonstration_chains(
    self, step: int, count: int, *, hops: tuple[int, ...]
  ) -> tuple[synthetic_wiki.World, list[synthetic_wiki.Chain]]:
    """Returns a world that no training step uses, and solved questions."""
    world = self._world(_index(0, step))
    return world, world.chains(count, hops=hops)

  def evaluation(self, count: int) -> dict[str, list[types.Question]]:
    """See `Questions`; every number of hops is a data set."""
    world = self._world(0)
    result = {}
    for hops in self.hops:
      chains = world.chains(count, hops=(hops,))
      name = chains[0].question.data_set
      result[name] = [chain.question for chain in chains]
    return result

  def passages(self) -> None:
    """See `Questions`; every passage belongs to a world."""
    return None

  def world_passages(self, world: int) -> list[types.Passage]:
    """See `Questions`."""
    return self._world(world).passages()

  def _world(self, index: int) -> synthetic_wiki.World:
    return synthetic_wiki.make_world(
      self.world_seed, index, **self.world_options
    )


def _index(run: int, step: int) -> int:
  """Returns the index of the world of a step; run 0 is for demonstrations."""
  if not 0 <= step < _WORLDS_PER_RUN - synthetic_wiki.NUM_EVALUATION_WORLDS:
    raise ValueError(f'step {step}: a run has at most {_WORLDS_PER_RUN} worlds')
  return _WORLDS_PER_RUN * run + synthetic_wiki.NUM_EVALUATION_WORLDS + step


class StoredQuestions(Questions):
  """Questions and passages from files, or from data sets that were built.

  A step takes the next `count` questions of the mixture's order. The questions
  of its resampling rounds are a random sample of all others. They still come up
  at their own places in the order.

  Args:
    seed: the seed of the order.
    train: the training questions.
    evaluation: the evaluation questions; empty for no evaluation.
    corpus: the file of passages, read when they are asked for; None if another
      server has them.
  """

  def __init__(
    self,
    *,
    seed: int,
    train: mixtures.Mixture,
    evaluation: Sequence[types.Question],
    corpus: pathlib.Path | None,
  ):
    self._seed = seed
    self._train = train
    self._evaluation = evaluation
    self._corpus = corpus

  def training_sample(self, count: int) -> list[types.Question]:
    """See `Questions`; at most 4,096, so that a check takes 1 or 2 seconds."""
    del count
    total = len(self._train)
    # Spread over all questions, because data sets lie one after the other.
    kept = np.linspace(0, total - 1, min(total, _CHECKED), dtype=int)
    return [self._train[int(index)] for index in kept]

  def train(
    self, step: int, count: int, *, resample_round: int = 0
  ) -> list[types.Question]:
    """See `Questions`."""
    total = len(self._train)
    if resample_round and (resample_round + 1) * count > total:
      raise ValueError(
        f'data.train has {total} questions; a step with its resampled groups '
        f'needs {(resample_round + 1) * count}'
      )
    chosen = self._train.order((self._seed,), step * count, count)
    if resample_round:
      others = self._others(step, set(chosen), resample_round * count)
      chosen = others[(resample_round - 1) * count :]
    return [self._train[index] for index in chosen]

  def _others(self, step: int, of_step: set[int], count: int) -> list[int]:
    """Returns `count` different indices that are not in `of_step`."""
    total, found = len(self._train), dict.fromkeys(())
    start = total
    # An order of the step's own. With weights a question may come up twice
    # before another one does, so orders are drawn until there are enough
    # different ones.
    while len(found) < count:
      order = self._train.order((self._seed, step), start, total)
      found |= dict.fromkeys(i for i in order if i not in of_step)
      start += total
    return list(found)[:count]

  def evaluation(self, count: int) -> dict[str, list[types.Question]]:
    """See `Questions`; they are a fixed sample of each data set."""
    # Not the seed of the run: scores of runs can be compared only on the same
    # questions.
    order = np.random.default_rng(0).permutation(len(self._evaluation))
    result = {}
    for index in order:
      question = self._evaluation[index]
      kept = result.setdefault(question.data_set, [])
      if len(kept) < count:
        kept.append(question)
    return result

  def passages(self) -> list[types.Passage]:
    """See `Questions`; the file is read once."""
    if self._corpus is None:
      raise ValueError(
        "data.corpus='': must name a file, whose passages are served here or "
        'train a tokenizer'
      )
    return self._passages

  @functools.cached_property
  def _passages(self) -> list[types.Passage]:
    assert self._corpus is not None
    return passages_lib.read_corpus(self._corpus)


def load(data: Any, *, seed: int) -> StoredQuestions:
  """Returns the questions that the section `data` of a config names.

  Args:
    data: the section: `name` (jsonl for files, tfds for data sets that were
      built), `root` (a folder, or an address such as gs://bucket/data), the
      mixtures `train` and `evaluation`, of which the second may be '', and
      `corpus` (a file of passages below root; '' if a server has them).
    seed: the seed of the run.

  Raises:
    FileNotFoundError, ValueError: if a file or a data set is missing or
      malformed; the message is one line.
    BucketError: if root is in a bucket that cannot be read.
  """
  root = buckets.local_folder(data.root)
  elements = _parts(data.name, root, data.train, ('train',))
  evaluated = []
  if data.evaluation:
    splits = 'test', 'validation'
    for part in _parts(data.name, root, data.evaluation, splits):
      evaluated += part
  weights = [e.weight for e in mixtures.parse(data.train) if e.weight]
  return StoredQuestions(
    seed=seed,
    train=mixtures.Mixture(elements, weights or None),
    evaluation=evaluated,
    corpus=root / data.corpus if data.corpus else None,
  )


def _parts(
  kind: str, root: pathlib.Path, mixture: str, splits: Sequence[str]
) -> list[Sequence[types.Question]]:
  """Returns the questions of each element of a mixture.

  Args:
    kind: jsonl for files, tfds for data sets that were built.
    root: the folder of the files or of the data sets.
    mixture: see `data/mixtures.py`.
    splits: where an element names no split, the first of these that exists is
      taken.
  """
  result = []
  for element in mixtures.parse(mixture):
    if kind == 'tfds':
      # This import takes a second, which only built data sets should cost.
      from stppo_jax.data import tfds_store

      wanted = [element.split] if element.split else splits
      questions = tfds_store.open_split(root, element.name, wanted)
    else:
      questions = readers.read_questions(root / element.name)
    result.append(element.choose(questions))
  return result
