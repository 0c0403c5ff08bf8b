"""The questions of each step, as a function of the seed and the step.

A resumed run therefore has the same questions, although no checkpoint holds
anything about questions.
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

# The training worlds of runs whose seeds differ by 1 have indices that differ
# by this number, so that no two runs share a world.
_WORLDS_PER_RUN = 1_000_000
# The largest number of training questions of files that are checked before a
# run.
_CHECKED = 4096


class Questions(Protocol):
  """A data set: training questions, evaluation questions and passages."""

  def training_sample(self, count: int) -> Sequence[types.Question]:
    """Returns training questions for a check before the run.

    If the questions are generated, `count` questions are returned. If they come
    from files, `count` is ignored, and a sample of all questions is returned.
    """
    return self.train(0, count)

  def train(
    self, step: int, count: int, *, resample_round: int = 0
  ) -> list[types.Question]:
    """Returns `count` different training questions, the same in every call.

    Args:
      step: the number of the step.
      count: the number of questions.
      resample_round: 0 for the questions that the step starts with, n for the
        questions of the n-th round of replacements. No two rounds of a step
        share a question.

    Raises:
      ValueError: if there are too few questions.
    """
    ...

  def evaluation(self, count: int) -> dict[str, list[types.Question]]:
    """Returns up to `count` questions per data set, the same in every run."""
    ...

  def passages(self) -> Sequence[types.Passage] | None:
    """Returns all passages; None if every passage belongs to a world."""
    ...

  def world_passages(self, world: int) -> Sequence[types.Passage]:
    """Returns the passages of a world.

    Raises:
      LookupError: if there is no such world, or these questions have no worlds.
    """
    raise LookupError(f'no world {world}: these questions have no worlds')


@dataclasses.dataclass(frozen=True)
class SyntheticQuestions(Questions):
  """Questions about a new synthetic world in every step.

  The evaluation questions are about world 0. The encyclopedia does not depend
  on the seed of the run. So runs of different seeds train on different worlds
  of the same encyclopedia, and are evaluated on the same questions.

  Attributes:
    seed: the seed of the run.
    world_seed: the seed of the encyclopedia.
    hops: the numbers of hops of the questions. The questions of a step take
      these numbers in turn.
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
    # The rounds of a step are consecutive slices of one list of chains, so no
    # two rounds share a question.
    world = self._world(_index(self.seed + 1, step))
    chains = world.chains((resample_round + 1) * count, hops=self.hops)
    return [chain.question for chain in chains[resample_round * count :]]

  def demonstration_chains(
    self, step: int, count: int, *, hops: tuple[int, ...]
  ) -> tuple[synthetic_wiki.World, list[synthetic_wiki.Chain]]:
    """Returns a world that no training step uses, and `count` of its chains.

    A chain is a question with the relations that lead to its answer.
    """
    world = self._world(_index(0, step))
    return world, world.chains(count, hops=hops)

  def evaluation(self, count: int) -> dict[str, list[types.Question]]:
    """See `Questions`; each number of hops has a data set of its own."""
    world = self._world(0)
    result = {}
    for hops in self.hops:
      chains = world.chains(count, hops=(hops,))
      name = chains[0].question.data_set
      result[name] = [chain.question for chain in chains]
    return result

  def passages(self) -> None:
    """Returns None, because every passage belongs to a world."""
    return None

  def world_passages(self, world: int) -> list[types.Passage]:
    """See `Questions`."""
    return self._world(world).passages()

  def _world(self, index: int) -> synthetic_wiki.World:
    return synthetic_wiki.make_world(
      self.world_seed, index, **self.world_options
    )


def _index(run: int, step: int) -> int:
  """Returns the index of the world that the questions of a step are about.

  `run` is 0 for demonstrations, and the seed of the run plus 1 for training.
  """
  most = _WORLDS_PER_RUN - synthetic_wiki.NUM_EVALUATION_WORLDS
  if not 0 <= step < most:
    raise ValueError(
      f'step {step}: a run has one world for each step, and at most {most} '
      'steps'
    )
  return _WORLDS_PER_RUN * run + synthetic_wiki.NUM_EVALUATION_WORLDS + step


class StoredQuestions(Questions):
  """Questions and passages from files, or from data sets that were built.

  A step takes the next `count` questions in the order of the mixture. If the
  step replaces questions, the replacements are a random sample of all other
  training questions. A replacement still comes up at its own position in the
  order.

  Args:
    seed: the seed of the order of the training questions.
    train: the training questions.
    evaluation: the evaluation questions; empty for no evaluation.
    corpus: the file of passages, which is read by the first call of `passages`;
      None without such a file.
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
    """See `Questions`; returns at most 4,096 questions.

    The check of so many questions takes 1 or 2 seconds.
    """
    del count
    total = len(self._train)
    # The indices are evenly spaced, because the questions of a data set lie
    # together and every data set should be checked.
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
    """Returns `count` different indices of questions, none from `of_step`."""
    total, found = len(self._train), dict.fromkeys(())
    start = total
    # The sample comes from an order that only this step has. With weights, a
    # question may come up twice before another question comes up once, so more
    # of the order is drawn until there are enough different questions.
    while len(found) < count:
      order = self._train.order((self._seed, step), start, total)
      found |= dict.fromkeys(i for i in order if i not in of_step)
      start += total
    return list(found)[:count]

  def evaluation(self, count: int) -> dict[str, list[types.Question]]:
    """See `Questions`; returns a fixed random sample of each data set."""
    # The seed is constant and not the seed of the run, because scores of runs
    # can be compared only on the same questions.
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
        "data.corpus='': must name the file of passages to serve, or to train "
        'a tokenizer on'
      )
    return self._passages

  @functools.cached_property
  def _passages(self) -> list[types.Passage]:
    assert self._corpus is not None
    return passages_lib.read_corpus(self._corpus)


def load(data: Any, *, seed: int) -> StoredQuestions:
  """Returns the questions that the section `data` of a config names.

  Args:
    data: the section. Its key `name` is jsonl for files, or tfds for data sets
      that were built. `root` is a folder, or an address such as
      gs://bucket/data. `train` and `evaluation` are mixtures; `evaluation` may
      be ''. `corpus` is a file of passages below `root`; '' if a server has the
      passages.
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
    mixture: the text of the mixture, see `data/mixtures.py`.
    splits: the splits that are tried in order for an element that names no
      split.
  """
  result = []
  for element in mixtures.parse(mixture):
    if kind == 'tfds':
      # This import takes a second, so it is made only for built data sets.
      from stppo_jax.data import tfds_store

      wanted = [element.split] if element.split else splits
      questions = tfds_store.open_split(root, element.name, wanted)
    else:
      questions = readers.read_questions(root / element.name)
    result.append(element.choose(questions))
  return result
