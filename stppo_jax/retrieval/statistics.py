"""Counts what became of queries."""

import collections

import numpy as np

_LATENCIES_KEPT = 65536


class Statistics:
  """The counts of a retriever since it was last asked for them."""

  def __init__(self):
    names = ('ok', 'retries', 'failures', 'answers', 'empty')
    self._counts = collections.Counter[str](dict.fromkeys(names, 0))
    self._latencies = collections.deque[float](maxlen=_LATENCIES_KEPT)

  def count_answer(self, *, is_empty: bool) -> None:
    """Counts an answer of the server or of the cache."""
    self._counts['answers'] += 1
    self._counts['empty'] += is_empty

  def count_success(self, seconds: float) -> None:
    """Counts a query that the server answered after these seconds."""
    self._counts['ok'] += 1
    self._latencies.append(seconds)

  def count_retries(self, number: int) -> None:
    """Counts repeated attempts of queries."""
    self._counts['retries'] += number

  def count_failure(self, error: BaseException) -> None:
    """Counts a query that was given up, under the `cause` of its error."""
    self._counts['failures'] += 1
    self._counts[f'failures/{getattr(error, "cause", "other")}'] += 1

  def metrics(self) -> dict[str, float]:
    """Returns the counts under the names of metrics.

    `retrieval/ok` and `retrieval/failures` count queries that were sent, so not
    answers from the cache. `retrieval/failures/{cause}` counts the failures of
    each cause, and `retrieval/retries` the repeated attempts.
    `retrieval/latency_*` are percentiles of the seconds from query to answer,
    retries included; 0 if there was no answer. `retrieval/answers` counts all
    answers, and `retrieval/empty` those without a passage.
    """
    latencies = self._latencies or [0.0]
    p50, p99 = np.percentile(latencies, [50, 99])
    values = {**self._counts, 'latency_p50': p50, 'latency_p99': p99}
    return {f'retrieval/{name}': float(n) for name, n in values.items()}
