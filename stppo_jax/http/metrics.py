"""The metrics of a server, in the text format of Prometheus.

In a process that has PROMETHEUS_MULTIPROC_DIR in its environment from the
start, values are kept in files of that folder, and each worker process of a
server answers with the sums of all.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import os
import time
from typing import Any

import prometheus_client
from prometheus_client import multiprocess

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
FOLDER_VARIABLE = 'PROMETHEUS_MULTIPROC_DIR'

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)


class Metrics:
  """The metrics of one server; their names get the prefix `stppo_`."""

  def __init__(self):
    self._registry = prometheus_client.CollectorRegistry()
    self._folder = os.environ.get(FOLDER_VARIABLE, '')
    self._place: Any = {'namespace': 'stppo', 'registry': self._registry}
    self._requests = prometheus_client.Counter(
      'http_requests',
      'Requests by path and status.',
      ('path', 'status'),
      **self._place,
    )
    self._seconds = prometheus_client.Histogram(
      'http_request_seconds',
      'Seconds per request, by path.',
      ('path',),
      buckets=_SECONDS,
      **self._place,
    )

  def counter(self, name: str, text: str) -> Callable[[float], None]:
    """Adds a counter; returns the function that increases it."""
    return prometheus_client.Counter(name, text, **self._place).inc

  def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
    """Adds a gauge, whose value is read whenever the metrics are.

    Worker processes cannot read each other's values, so a server that has
    several of them leaves the gauge out.
    """
    if not self._folder:
      gauge = prometheus_client.Gauge(name, text, **self._place)
      gauge.set_function(value)

  @contextlib.contextmanager
  def request(self, path: str) -> Iterator[Callable[[int], None]]:
    """Measures a request; yields the function that takes its status."""
    statuses = []
    begin = time.perf_counter()
    try:
      yield statuses.append
    finally:
      self._seconds.labels(path).observe(time.perf_counter() - begin)
      # A request without a status was cancelled at the end of the server.
      status = statuses[0] if statuses else 'cancelled'
      self._requests.labels(path, status).inc()

  def exposition(self) -> bytes:
    """Returns all metrics as text."""
    registry = self._registry
    if self._folder:
      registry = prometheus_client.CollectorRegistry()
      multiprocess.MultiProcessCollector(registry, path=self._folder)
    return prometheus_client.generate_latest(registry)
