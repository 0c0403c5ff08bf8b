"""Rankings are fused by reciprocal rank."""

import pytest

from stppo_jax import types
from stppo_jax.retrieval.indexes import backends


class _Ranked:
  """An index that answers with the ids of a query, a letter each."""

  def __init__(self, rankings):
    self._rankings = rankings
    self.depths = []

  def __len__(self):
    return 26

  def search(self, queries, topk):
    self.depths.append(topk)
    return [
      [types.Passage(name, '', '', 5.0) for name in self._rankings[query]]
      for query in queries
    ]


def test_ranks_are_fused():
  first, second = _Ranked({'q': 'abc', 'r': ''}), _Ranked({'q': 'cda', 'r': ''})
  index = backends.HybridIndex([first, second])
  found, none = index.search(['q', 'r'], 3)
  assert none == [] and len(index) == 26
  # a: ranks 1 and 3; c: ranks 3 and 1, a tie; b and d: rank 2 of one.
  assert [p.id for p in found] == ['a', 'c', 'b']
  assert found[0].score == pytest.approx(1 / 61 + 1 / 63)
  assert found[2].score == pytest.approx(1 / 62)
  assert first.depths == second.depths == [100]
