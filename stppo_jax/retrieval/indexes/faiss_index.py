"""Search in an index that FAISS has written, such as a published one.

FAISS is optional; `pip install '.[faiss]'` in the clone installs it.
"""

from collections.abc import Sequence
import dataclasses
import importlib
import os
from typing import Any

import numpy as np

from stppo_jax import types
from stppo_jax.retrieval.indexes import dense


class FaissIndex:
  """Searches a file of FAISS with the vectors of queries."""

  def __init__(
    self,
    path: str | os.PathLike[str],
    passages: Sequence[types.Passage],
    encode: dense.Encode,
    *,
    size: int,
    query_prefix: str = '',
  ):
    """Opens the file; its vectors are memory-mapped where the kind allows.

    Args:
      path: the file that FAISS wrote.
      passages: the passages, in the order of the index.
      encode: returns the vectors of texts.
      size: the width of these vectors.
      query_prefix: written in front of every query, as the encoder expects it.

    Raises:
      ValueError: if FAISS is not installed, the file is not readable, or its
        vectors have another number or width; the message is one line.
    """
    try:
      # FAISS makes its names at import, so types cannot be checked.
      faiss: Any = importlib.import_module('faiss')
    except ImportError as error:
      raise ValueError(
        "FAISS is not installed: run pip install '.[faiss]' in the clone"
      ) from error
    if not os.path.isfile(path):
      raise ValueError(f'{path}: no such file')
    try:
      self._index = faiss.read_index(os.fspath(path), faiss.IO_FLAG_MMAP)
    except RuntimeError as error:
      line = ' '.join(str(error).split())
      raise ValueError(f'{path}: not an index of FAISS: {line}') from error
    if self._index.ntotal != len(passages):
      raise ValueError(
        f'{path}: {self._index.ntotal} vectors for {len(passages)} passages: '
        'the index of another corpus'
      )
    if self._index.d != size:
      raise ValueError(
        f'{path}: vectors of {self._index.d} numbers, but the encoder makes '
        f'vectors of {size}: the index of another encoder'
      )
    # Scores are better the larger they are, so distances change their sign.
    self._sign = -1.0 if self._index.metric_type == faiss.METRIC_L2 else 1.0
    self._passages = passages
    self._encode = encode
    self._query_prefix = query_prefix

  def __len__(self) -> int:
    return len(self._passages)

  def search(
    self, queries: Sequence[str], topk: int
  ) -> list[list[types.Passage]]:
    """Returns the passages that FAISS finds, best first."""
    if not queries:
      return []
    vectors = self._encode([self._query_prefix + q for q in queries])
    found = self._index.search(
      np.ascontiguousarray(vectors, np.float32), min(topk, len(self))
    )
    return [
      [
        dataclasses.replace(self._passages[int(n)], score=self._sign * float(s))
        for s, n in zip(scores, rows)
        if n >= 0  # FAISS pads its results with -1.
      ]
      for scores, rows in zip(*found)
    ]
