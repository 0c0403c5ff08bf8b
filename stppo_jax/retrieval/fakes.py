"""A retriever without a network, for tests and tutorials."""

from collections.abc import Callable, Collection, Mapping, Sequence

from stppo_jax import types
from stppo_jax.retrieval import protocol

Passages = Sequence[types.Passage]


class FakeRetriever:
  """A retriever that answers from a table or a function.

  Attributes:
    calls: (corpus, query) of every call in order, including failed calls.
  """

  def __init__(
    self,
    passages: Mapping[str, Passages] | Callable[[str], Passages],
    *,
    fail_on: Collection[str] = (),
  ):
    """Makes a retriever.

    Args:
      passages: the passages of each query, or a function that returns the
        passages of a query. A query that is not in the table finds no passages.
      fail_on: queries that raise RetrievalError.
    """
    self._passages = passages
    self._fail_on = frozenset(fail_on)
    self.calls: list[tuple[str, str]] = []

  async def retrieve(
    self, query: str, *, corpus: str = ''
  ) -> list[types.Passage]:
    """See `protocol.Retriever`."""
    self.calls.append((corpus, query))
    if query in self._fail_on:
      raise protocol.RetrievalError(f'{query!r} is in fail_on')
    if callable(self._passages):
      return list(self._passages(query))
    return list(self._passages[query]) if query in self._passages else []
