"""Counts what became of queries, and classifies the failures of requests."""

import collections

import numpy as np

from stppo_jax.http import client as http_client

_LATENCIES_KEPT = 65536


class Statistics:
  """The counts of a retriever since it was last asked for them.

  Attributes:
    retries: the number of repeated attempts of queries.
  """

  def __init__(self):
    self.retries = 0
    self._ok = self._failures = 0
    self._answers = self._empty = 0
    self._causes: dict[str, int] = {}
    self._latencies = collections.deque[float](maxlen=_LATENCIES_KEPT)

  def count_answer(self, *, is_empty: bool) -> None:
    """Counts an answer of the server or of the cache."""
    self._answers += 1
    self._empty += is_empty

  def count_success(self, seconds: float) -> None:
    """Counts a query that the server answered after these seconds."""
    self._ok += 1
    self._latencies.append(seconds)

  def count_failure(self, error: BaseException) -> None:
    """Counts a query that was given up, under the `cause` of its error."""
    self._failures += 1
    cause = getattr(error, 'cause', 'other')
    self._causes[cause] = self._causes.get(cause, 0) + 1

  def metrics(self) -> dict[str, float]:
    """Returns the counts under the names of metrics.

    `retrieval/ok` and `retrieval/failures` count queries that were sent, so not
    answers from the cache. `retrieval/failures/{cause}` counts the failures of
    each cause, and `retrieval/retries` the repeated attempts.
    `retrieval/latency_*` are percentiles of the seconds from query to answer,
    retries included; 0 if there was no answer. `retrieval/answers` counts all
    answers, and `retrieval/empty` those without a passage.
    """
    p50, p99 = (
      np.percentile(self._latencies, [50, 99])
      if self._latencies
      else (0.0, 0.0)
    )
    counts = {
      'ok': self._ok,
      'retries': self.retries,
      'failures': self._failures,
      'answers': self._answers,
      'empty': self._empty,
      'latency_p50': p50,
      'latency_p99': p99,
    }
    counts |= {f'failures/{name}': n for name, n in self._causes.items()}
    return {f'retrieval/{name}': float(n) for name, n in counts.items()}


# A retry does not help against these statuses: the address or the token is
# wrong.
PERMANENT = frozenset({401, 403, 404, 405, *range(300, 400)})
# Statuses of a server that is away, or overloaded; no query is to blame.
_AWAY = frozenset({502, 503, 504})
_OVERLOADED = _AWAY | {408, 429}


def injected(kind: str) -> http_client.Failure:
  """Returns the failure of a request whose queries all have injected faults."""
  cause, _, status = kind.partition('_')
  return http_client.Failure(
    f'injected fault: {kind}',
    http_client.Cause(cause),
    status=int(status or 0),
  )


def a_query_may_be_to_blame(failure: http_client.Failure) -> bool:
  """Returns whether a single query may have made its whole request fail."""
  if failure.cause is http_client.Cause.STATUS:
    return failure.status not in _OVERLOADED
  return failure.cause is not http_client.Cause.CONNECTION


def signals_outage(error: Exception) -> bool:
  """Returns whether the error of a request means that the server is away."""
  if not isinstance(error, http_client.Failure):
    return False
  return error.status in _AWAY or error.cause in (
    http_client.Cause.CONNECTION,
    http_client.Cause.TIMEOUT,
  )
