"""The protocol of a retriever."""

from typing import Protocol

from stppo_jax import types


class RetrievalError(Exception):
  """The infrastructure failed one query, its retries included.

  Never the policy's doing: its trajectory becomes INFRA_ERROR and weighs
  nothing. The message is one line.
  """


class RetrieverUnreachable(Exception):
  """No retriever answered within the grace at the start of a run.

  Not a RetrievalError, so that no environment mistakes it for the failure of
  one query: the command exits with 75, try again.
  """

  exit_code = 75


class Retriever(Protocol):
  """Finds passages for a query."""

  async def retrieve(
    self, query: str, *, corpus: str = ''
  ) -> list[types.Passage]:
    """The best passages for a query, best first; none if nothing matches.

    Args:
      query: as the policy wrote it, neither empty nor over-long.
      corpus: `Question.corpus`; '' is the server's own.

    Raises:
      RetrievalError: the infrastructure failed, after all retries.
    """
    ...
