"""BM25 over passages, with rankings that do not vary between runs.

P passages.
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

  With jax, bm25s would start jax's backend at import: that occupies the
  accelerator, and `jax.distributed.initialize` refuses to run after it. Without
  jax it uses numpy, which suffices here.
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
  """Returns the lower-cased runs of letters, digits and underscores of a text.

  No word is left out as a stop word.
  """
  return _WORD.findall(text.lower())


class Bm25Index:
  """An index over the title and text of passages.

  A passage's score is the sum over the distinct words w of the query of

      idf(w) tf / (tf + k1 (1 - b + b length / mean length))
      idf(w) = log(1 + (P - df + 1/2) / (df + 1/2))

  as in Lucene. tf is the count of w in the passage, df the number of passages
  with w, and length the number of words of the passage. Source: Kamphuis et al.
  2020, "Which BM25 do you mean?".
  """

  def __init__(
    self,
    passages: Sequence[types.Passage],
    *,
    k1: float = 0.9,
    b: float = 0.4,
  ):
    self._passages: Sequence[types.Passage] = tuple(passages)
    # Word ids in order of appearance: bm25s would number the words in the order
    # of a set, which differs from process to process.
    vocabulary: dict[str, int] = {}
    word_ids = [
      [
        vocabulary.setdefault(word, len(vocabulary))
        for word in words_of(f'{passage.title}\n{passage.text}')
      ]
      for passage in self._passages
    ]
    self._index = None
    # Without any word, the mean length would be 0 and the scores nan.
    if vocabulary:
      self._index = _bm25s.BM25(k1=k1, b=b, method='lucene', backend='numpy')
      self._index.index(
        (word_ids, vocabulary), create_empty_token=False, show_progress=False
      )

  def save(self, folder: str | os.PathLike[str]) -> None:
    """Writes the index, without the passages, for `load`.

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
      passages: the passages that the index was built from; they are read when
        they are found.

    Raises:
      ValueError: if the files are damaged, or made from another number of
        passages.
    """
    try:
      saved = _bm25s.BM25.load(folder, mmap=True, show_progress=False)
    except Exception as error:  # bm25s raises many kinds for damaged files
      raise ValueError(f'{folder}: damaged BM25 index: {error}') from error
    sizes = [np.shape(saved.scores[name]) for name in ('data', 'indices')]
    ends = np.ravel(saved.scores['indptr'])[-1:].tolist()
    if sizes != [tuple(ends)] * 2:
      raise ValueError(
        f'{folder}: damaged BM25 index: the sizes of its files do not match'
      )
    if saved.scores['num_docs'] != len(passages):
      raise ValueError(
        f'{folder}: an index of {saved.scores["num_docs"]} passages, but there '
        f'are {len(passages)}'
      )
    # Indexing a memmap is slow; a view of the same pages is not.
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
      A list per query, best first, ties in the order of the corpus. It has only
      passages that share a word with the query, so it may be shorter than
      `topk`, and is empty if no word of the query is in the corpus.
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
