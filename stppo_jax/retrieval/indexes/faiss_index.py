"""Searches an index that FAISS has written, such as a published index.

FAISS is optional; `pip install '.[faiss]'` in the clone installs it.
"""

from collections.abc import Sequence
import importlib
import os
from typing import Any

import numpy as np

from stppo_jax import types
from stppo_jax.retrieval.indexes import dense


class FaissIndex(dense.VectorIndex):
  """Finds the passages of each query with an index that FAISS has written."""

  def __init__(
    self,
    path: str | os.PathLike[str],
    passages: Sequence[types.Passage],
    encode: dense.Encode,
    *,
    size: int,
    query_prefix: str = '',
  ):
    """Opens the file; memory-maps its vectors if the index type allows that.

    Args:
      path: the file that FAISS wrote.
      passages: the passages, in the order of the index.
      encode, query_prefix: see `dense.VectorIndex`.
      size: the width of the encoder's vectors.

    Raises:
      ValueError: if FAISS is not installed, the file is not readable, or the
        number or the width of its vectors is wrong; the message is one line.
    """
    super().__init__(passages, encode, query_prefix)
    try:
      # FAISS defines its names at import, so types cannot be checked.
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
    # A larger score must be better, so distances are negated.
    self._sign = -1.0 if self._index.metric_type == faiss.METRIC_L2 else 1.0

  def nearest(
    self, query_vectors: np.ndarray, topk: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """See `dense.VectorIndex`; FAISS pads missing results with row -1.

    If the index has L2 distances, the products are distances times -1.
    """
    products, rows = self._index.search(
      np.ascontiguousarray(query_vectors, np.float32), min(topk, len(self))
    )
    return self._sign * products, rows
