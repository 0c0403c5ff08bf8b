"""Several indexes of one corpus, their rankings fused by reciprocal rank."""

from collections.abc import Sequence
import dataclasses

from stppo_jax import types
from stppo_jax.retrieval import protocol

# The larger the offset, the less the first ranks differ. Source: Cormack et al.
# 2009, "Reciprocal Rank Fusion outperforms Condorcet and individual rank
# learning methods".
_RANK_OFFSET = 60
_DEPTH = 100  # passages that each index contributes


class HybridIndex:
  """Ranks by the sum over indexes of 1 / (60 + rank), ranks from 1."""

  def __init__(self, indexes: Sequence[protocol.Index]):
    """Joins indexes; their passages must be the same."""
    self._indexes = tuple(indexes)

  def __len__(self) -> int:
    return len(self._indexes[0])

  def search(
    self, queries: Sequence[str], topk: int
  ) -> list[list[types.Passage]]:
    """Returns the best passages; ties are in the order of the indexes."""
    depth = max(topk, _DEPTH)
    rankings = [index.search(queries, depth) for index in self._indexes]
    return [_fuse(lists)[:topk] for lists in zip(*rankings)]


def _fuse(lists: Sequence[Sequence[types.Passage]]) -> list[types.Passage]:
  scores: dict[str, float] = {}
  passages: dict[str, types.Passage] = {}
  for ranking in lists:
    for rank, passage in enumerate(ranking, start=1):
      passages.setdefault(passage.id, passage)
      scores.setdefault(passage.id, 0.0)
      scores[passage.id] += 1 / (_RANK_OFFSET + rank)
  order = sorted(scores, key=lambda name: -scores[name])
  return [
    dataclasses.replace(passages[name], score=scores[name]) for name in order
  ]
