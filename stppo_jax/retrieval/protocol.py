"""The protocol of a retriever, and its errors."""

from typing import Protocol

from stppo_jax import exits
from stppo_jax import types


class RetrievalError(Exception):
  """Raised if a query and all its retries fail because of the infrastructure.

  The policy is never the cause, so the trajectory ends with INFRA_ERROR and has
  no weight in training. The message is one line.

  Attributes:
    cause: a short name of the cause, for metrics: 'timeout', 'status_500', ...
  """

  def __init__(self, line: str, cause: str = 'other'):
    super().__init__(line)
    self.cause = cause


class RetrieverUnreachable(exits.RunEnded):
  """Raised if no retriever was ready within `ready_timeout` seconds.

  This error is no RetrievalError, so that no environment treats it as the
  failure of one query. The command ends with exit code 75 and can be repeated.
  """


class RetrieverMisconfigured(exits.RunEnded):
  """Raised if a server will never answer this run.

  The address, the token or the dialect is wrong. Waiting does not help, so this
  error is treated neither as the failure of one query nor as an outage. The
  command ends with exit code 2.
  """

  exit_code = exits.USAGE


class Retriever(Protocol):
  """Finds passages for a query."""

  async def retrieve(
    self, query: str, *, corpus: str = ''
  ) -> list[types.Passage]:
    """Returns the best passages for a query, best first, or an empty list.

    Args:
      query: the query that the policy wrote, neither empty nor too long.
      corpus: the corpus to search, `Question.corpus`; '' for the corpus of the
        server.

    Raises:
      RetrievalError: if the query and all its retries fail because of the
        infrastructure.
      RetrieverMisconfigured: if the server refuses every query of this run.
    """
    ...


class Server(Retriever, Protocol):
  """A retriever that may be out of reach, and counts its queries."""

  async def wait_until_ready(self) -> None:
    """Waits until the server is ready.

    Raises:
      RetrieverUnreachable: if no server answers in time. A server may answer
        later.
      RetrieverMisconfigured: if the server refuses this run.
    """

  def statistics(self) -> dict[str, float]:
    """Returns metrics of the queries since the last call."""
    ...
