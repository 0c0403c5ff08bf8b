"""BM25 over passages, with rankings that do not vary between runs.

P is the number of passages.
"""

from collections.abc import Sequence
import dataclasses
import logging
import os
import re
import sys
from typing import Any

import numpy as np

from stppo_jax import types


def _import_bm25s():
  """Imports bm25s while jax cannot be imported.

  If bm25s finds jax, it starts jax's backend at import. The backend occupies
  the accelerator, and `jax.distributed.initialize` refuses to run afterwards.
  Without jax, bm25s uses numpy, which suffices here.
  """
  modules: dict[str, Any] = sys.modules
  absent = object()
  jax = modules.get('jax', absent)
  modules['jax'] = None  # `import jax` now raises ImportError.
  try:
    import bm25s
  finally:
    if jax is absent:
      del modules['jax']
    else:
      modules['jax'] = jax
  # bm25s sets its logger to DEBUG, which prints some lines for every index.
  logging.getLogger('bm25s').setLevel(logging.WARNING)
  return bm25s


_bm25s = _import_bm25s()
_WORD = re.compile(r'\w+')


def words_of(text: str) -> list[str]:
  """Returns the words of a text in lower case, including stop words.

  A word is a sequence of letters, digits and underscores.
  """
  return _WORD.findall(text.lower())


class Bm25Index:
  """An index over the title and text of passages.

  As in Lucene, the score of a passage is a sum over the distinct words w of the
  query:

      score = sum_w idf(w) tf / (tf + k1 (1 - b + b length / mean length))
      idf(w) = log(1 + (P - df + 1/2) / (df + 1/2))

  tf is the count of w in the passage, df the number of passages with w, and
  length the number of words of the passage. Source: Kamphuis et al. 2020,
  "Which BM25 do you mean?".
  """

  def __init__(
    self,
    passages: Sequence[types.Passage],
    *,
    k1: float = 0.9,
    b: float = 0.4,
  ):
    self._passages: Sequence[types.Passage] = tuple(passages)
    # Words are numbered in the order in which they appear. bm25s would number
    # them in the order of a set, which differs from process to process.
    vocabulary: dict[str, int] = {}
    word_ids = [
      [
        vocabulary.setdefault(word, len(vocabulary))
        for word in words_of(f'{passage.title}\n{passage.text}')
      ]
      for passage in self._passages
    ]
    self._index = None
    # If no passage has a word, there is no index: the mean length would be 0,
    # and scores would be nan.
    if vocabulary:
      self._index = _bm25s.BM25(k1=k1, b=b, method='lucene', backend='numpy')
      self._index.index(
        (word_ids, vocabulary), create_empty_token=False, show_progress=False
      )

  def save(self, folder: str | os.PathLike[str]) -> None:
    """Writes the index, but not the passages, to a folder for `load`.

    Raises:
      ValueError: if no passage has a word.
    """
    if self._index is None:
      raise ValueError('no passage has a word that BM25 could index')
    self._index.save(folder, show_progress=False)

  @classmethod
  def load(
    cls, folder: str | os.PathLike[str], passages: Sequence[types.Passage]
  ) -> 'Bm25Index':
    """Returns an index that `save` wrote; its arrays are memory-mapped.

    Args:
      folder: the folder that `save` wrote to.
      passages: the passages from which the index was built; a passage is read
        only when a search finds it.

    Raises:
      ValueError: if the files are damaged, or made from another number of
        passages.
    """
    try:
      saved = _bm25s.BM25.load(folder, mmap=True, show_progress=False)
    except Exception as error:  # damaged files lead to many kinds of errors
      raise ValueError(f'{folder}: damaged BM25 index: {error}') from error
    sizes = [np.shape(saved.scores[name]) for name in ('data', 'indices')]
    ends = np.ravel(saved.scores['indptr'])[-1:].tolist()
    if sizes != [tuple(ends)] * 2:
      raise ValueError(
        f'{folder}: damaged BM25 index: the sizes of its files do not match'
      )
    if saved.scores['num_docs'] != len(passages):
      raise ValueError(
        f'{folder}: an index of {saved.scores["num_docs"]} passages, but the '
        f'corpus has {len(passages)}'
      )
    # Indexing a memmap is slow; indexing a plain view of its memory is not.
    for name in ('data', 'indices', 'indptr'):
      saved.scores[name] = np.asarray(saved.scores[name])
    index = cls.__new__(cls)
    index._passages, index._index = passages, saved
    return index

  def __len__(self) -> int:
    return len(self._passages)

  def search(
    self, queries: Sequence[str], topk: int
  ) -> list[list[types.Passage]]:
    """Returns the best passages of each query.

    Args:
      queries: the texts to search for.
      topk: the most passages per query; may exceed P.

    Returns:
      A list of passages for each query, best first, ties in the order of the
      corpus. A list has only passages that share a word with the query, so it
      may be shorter than `topk`, or empty.
    """
    return [self._search(query, topk) for query in queries]

  def _search(self, query: str, topk: int) -> list[types.Passage]:
    if self._index is None:
      return []
    words = list(dict.fromkeys(words_of(query)))
    word_ids = self._index.get_tokens_ids(words)
    if not word_ids:
      return []
    scores_P = self._index.get_scores_from_ids(word_ids)
    return [
      dataclasses.replace(self._passages[n], score=float(scores_P[n]))
      for n in _best(scores_P, topk)
    ]


def _best(scores_P: np.ndarray, topk: int) -> np.ndarray:
  """Returns the indices of the largest positive scores, ties in corpus order.

  `np.partition` gives only the threshold, because its choice among equal scores
  would be arbitrary.
  """
  size, threshold = len(scores_P), 0.0
  if size > topk:
    threshold = np.partition(scores_P, size - topk)[size - topk]
  found = scores_P >= threshold if threshold > 0 else scores_P > 0
  indices = np.flatnonzero(found)
  return indices[np.argsort(-scores_P[indices], kind='stable')[:topk]]
