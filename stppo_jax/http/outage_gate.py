"""Makes requests wait while a server fails most of them."""

import asyncio
import collections
from collections.abc import AsyncIterator, Awaitable, Callable
import contextlib
import logging
import time

# The number of latest requests that decide whether the gate closes. It is
# small, so that even a query that is sent alone closes the gate before it has
# used up its usual four retries.
_WINDOW = 6
_LEAST = 3  # the fewest failed requests that can close the gate
_log = logging.getLogger(__name__)


class OutageGate:
  """A gate that closes when too many of the last requests have failed.

  While the gate is closed, requests wait. One task waits until the server is
  ready, and then all requests go on. Without the gate, each request would use
  up its few retries within seconds of an outage.

  Args:
    max_failure_rate: the share of the last six requests that may fail; at
      least three must have failed for the gate to close.
    signals_outage: returns whether an error of a request means that the server
      is out of reach; requests with other errors count as answered.
    until_ready: waits until the server is ready; raises an error if the server
      will never be ready, or is not ready in time.
    server: the name of the server in log lines.

  Attributes:
    times_closed: the number of times that the gate has closed.
    seconds_closed: the seconds spent on waiting until the server was ready.
  """

  def __init__(
    self,
    max_failure_rate: float,
    signals_outage: Callable[[Exception], bool],
    until_ready: Callable[[], Awaitable[None]],
    *,
    server: str,
  ):
    self._max_failure_rate = max_failure_rate
    self._signals_outage = signals_outage
    self._until_ready = until_ready
    self._server = server
    self._succeeded = collections.deque[bool](maxlen=_WINDOW)
    self._is_closed = False
    self._prober: asyncio.Task[None] | None = None
    self.reset_statistics()

  def reset_statistics(self) -> None:
    """Sets the statistics to 0."""
    self.times_closed, self.seconds_closed = 0, 0.0

  @contextlib.asynccontextmanager
  async def request(self) -> AsyncIterator[None]:
    """Waits while the gate is closed, before the caller sends a request.

    The caller sends the request in the body of the `with` statement. If the
    body raises an error that signals an outage, the request counts as failed.
    Otherwise the request counts as answered.

    Raises:
      Exception: the error of `until_ready`, in each request that waits.
    """
    if self._is_closed:
      if self._prober is None:
        self._prober = asyncio.create_task(self._probe())
      # If this request is cancelled, the shield lets the other requests go on
      # waiting.
      await asyncio.shield(self._prober)
    try:
      yield
    except Exception as error:
      self._count(succeeded=not self._signals_outage(error))
      raise
    self._count(succeeded=True)

  async def close(self) -> None:
    """Cancels the task that waits until the server is ready."""
    if self._prober is not None:
      self._prober.cancel()
      await asyncio.wait([self._prober])

  async def _probe(self) -> None:
    began = time.monotonic()
    _log.warning(
      '%s is out of reach: requests wait until it is ready', self._server
    )
    try:
      await self._until_ready()
      _log.warning('%s is ready again', self._server)
      self._is_closed = False
      # The failures that closed the gate must not close it again.
      self._succeeded.clear()
    finally:
      self.seconds_closed += time.monotonic() - began
      self._prober = None

  def _count(self, *, succeeded: bool) -> None:
    """Counts a request, and closes the gate if too many have failed."""
    if self._is_closed:  # the request was sent before the gate closed
      return
    self._succeeded.append(succeeded)
    failed = self._succeeded.count(False)
    is_outage = failed > self._max_failure_rate * len(self._succeeded)
    if failed >= _LEAST and is_outage:
      self._is_closed = True
      self.times_closed += 1
