"""BM25 over a list of passages, with rankings one can predict by hand.

N passages, Q queries.
"""

from collections.abc import Sequence
import dataclasses
import logging
import re
import sys
from typing import Any

import numpy as np

from stppo_jax import types


def _import_bm25s():
  """Imports bm25s while jax cannot be found.

  Where it finds jax, bm25s starts jax's backend at import: that takes hold of
  the accelerator, and `jax.distributed.initialize` refuses to run after it. It
  falls back on numpy, which is all we need.
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
  # It asks for DEBUG, a few lines for every index built.
  logging.getLogger('bm25s').setLevel(logging.WARNING)
  return bm25s


_bm25s = _import_bm25s()
_WORD = re.compile(r'\w+')


def words_of(text: str) -> list[str]:
  """Lower-cased runs of letters, digits and underscores; no stop words."""
  return _WORD.findall(text.lower())


class Bm25Index:
  """An index over the title and text of passages.

  A passage's score is the sum over the query's words w, repeats counted, of

      idf(w) tf / (tf + k1 (1 - b + b length / mean length))
      idf(w) = log(1 + (N - df + 1/2) / (df + 1/2))

  as in Lucene. (Kamphuis et al. 2020, "Which BM25 do you mean?")
  """

  def __init__(
    self,
    passages: Sequence[types.Passage],
    *,
    k1: float = 0.9,
    b: float = 0.4,
  ):
    self._passages = tuple(passages)
    # Ids in order of appearance: bm25s's own numbering goes through a set,
    # which differs from process to process.
    vocabulary: dict[str, int] = {}
    word_ids = [
      [
        vocabulary.setdefault(word, len(vocabulary))
        for word in words_of(f'{passage.title}\n{passage.text}')
      ]
      for passage in self._passages
    ]
    self._index = None
    if vocabulary:  # Lengths are divided by their mean, which must not be 0.
      self._index = _bm25s.BM25(k1=k1, b=b, method='lucene', backend='numpy')
      self._index.index(
        (word_ids, vocabulary), create_empty_token=False, show_progress=False
      )

  def __len__(self) -> int:
    return len(self._passages)

  def search(
    self, queries: Sequence[str], topk: int
  ) -> list[list[types.Passage]]:
    """The best passages of each query.

    Args:
      queries: Q texts.
      topk: at most this many passages per query; may exceed N.

    Returns:
      Q lists, best first, ties in the order of the corpus. Only passages that
      share a word with the query are found, so a list may be shorter than
      `topk`, and that of a query without any known word is empty.
    """
    return [self._search(query, topk) for query in queries]

  def _search(self, query: str, topk: int) -> list[types.Passage]:
    if self._index is None:
      return []
    word_ids = self._index.get_tokens_ids(words_of(query))
    if not word_ids:
      return []
    scores_N = self._index.get_scores_from_ids(word_ids)
    return [
      dataclasses.replace(self._passages[n], score=float(scores_N[n]))
      for n in _best(scores_N, topk)
    ]


def _best(scores_N: np.ndarray, topk: int) -> np.ndarray:
  """Indices of the largest positive scores; of equal ones the first come first.

  A partition picks equal scores in any order, so it only gives the threshold.
  """
  found = np.flatnonzero(scores_N > 0)
  if len(found) > topk:
    scores = scores_N[found]
    threshold = np.partition(scores, len(scores) - topk)[len(scores) - topk]
    ties = found[scores == threshold]
    above = found[scores > threshold]
    found = np.concatenate([above, ties[: topk - len(above)]])
  return found[np.argsort(-scores_N[found], kind='stable')]
