"""The HTTP client for retrieval and inference servers.

A request that fails raises `Failure`, which names the cause. Whether another
attempt can help differs between servers, so the caller decides about retries
and calls `back_off` between attempts. Redirects are not followed, proxies named
by environment variables are not used, and the size of a reply is bounded.
"""

import asyncio
from collections.abc import Collection
import contextlib
import datetime
from email import utils as email_utils
import enum
import math
import os
import random
import time
from typing import Any, NamedTuple

import aiohttp
import yarl

from stppo_jax.http import outage_gate

MAX_REPLY_BYTES = 64 << 20  # a larger reply is a failure

_EXCERPT = 200  # characters of an error reply that a message quotes
_OPEN = contextlib.nullcontext()  # takes the place of a gate if there is none
# The random generator of all clients. The module `random` is not used, because
# its state belongs to the user's code.
_JITTER = random.Random()
# The tasks that hold sessions open. The event loop has only weak references to
# its tasks, so without this set the task of a dropped client would end without
# closing its session.
_keepers: set[asyncio.Task] = set()


class Pauses(NamedTuple):
  """How long a client waits, in seconds.

  Attributes:
    first: the pause before the first retry; doubled for each further retry.
    longest: the longest pause that doubling can reach, before the random factor
      of `Client.back_off`.
    longest_retry_after: the longest pause that a Retry-After header can cause,
      so that a server with a wrong clock does not stop the run.
    health: the pause between two health checks of a server that is not ready.
  """

  first: float = 0.25
  longest: float = 8.0
  longest_retry_after: float = 60.0
  health: float = 0.2


PAUSES = Pauses()


class Cause(enum.Enum):
  """Why a request failed."""

  CONNECTION = 'connection'  # refused, reset, or cut off during a reply
  TIMEOUT = 'timeout'
  STATUS = 'status'  # any status but 200
  TOO_LARGE = 'too large'
  MALFORMED = 'malformed'  # status 200, but the caller could not read the reply


class Failure(Exception):
  """The failure of one request; the message is one line.

  Attributes:
    cause: why the request failed.
    status: the status of the reply if the cause is STATUS, else 0.
    retry_after: the seconds of the reply's Retry-After header; 0 if the
      reply has no such header.
  """

  def __init__(
    self,
    line: str,
    cause: Cause,
    *,
    status: int = 0,
    retry_after: float = 0.0,
  ):
    super().__init__(line)
    self.cause = cause
    self.status = status
    self.retry_after = retry_after


class NotReady(Exception):
  """A server was not ready in time; the message is one line."""


class Client:
  """Sends requests to one server, from one event loop.

  `close` closes the connections. They are also closed if the event loop cancels
  its tasks at its end, as `asyncio.run` and `event_loop.EventLoop` do.

  Attributes:
    url: the URL that all paths are appended to.
    timeout: the seconds that a request may take.
  """

  def __init__(
    self,
    url: str,
    *,
    timeout: float,
    token_variable: str,
    max_concurrent: int | None = None,
    gate: outage_gate.OutageGate | None = None,
  ):
    """Makes a client; nothing is sent yet.

    Args:
      url: a URL that `address.base_url` returned.
      timeout: the seconds that a request may take.
      token_variable: the environment variable that holds the bearer token; it
        is read now.
      max_concurrent: the largest number of POSTs in flight; further POSTs wait.
        None for no limit.
      gate: the gate that makes POSTs wait while the server fails; None for no
        gate.
    """
    self.url = url
    self.timeout = timeout
    self._token = os.environ.get(token_variable, '')
    self._slots = (
      asyncio.Semaphore(max_concurrent)
      if max_concurrent
      else contextlib.nullcontext()
    )
    self._gate = gate
    self._keeper: asyncio.Task | None = None

  async def get(self, path: str, *, timeout: float | None = None) -> bytes:
    """Sends a GET once; returns the body of a 200 reply or raises `Failure`."""
    return await self._request('GET', path, None, timeout or self.timeout)

  async def post(self, path: str, body: Any) -> bytes:
    """Sends a POST of JSON once, and returns the body of a 200 reply.

    Raises:
      Failure: if there was no reply, or a reply with another status.
      Exception: see `OutageGate.request`.
    """
    # The timeout starts only when a slot is free. Otherwise the last requests
    # of a burst would time out before they are sent.
    async with self._slots, self._gate.request() if self._gate else _OPEN:
      return await self._request('POST', path, body, self.timeout)

  async def wait_until_ready(
    self,
    path: str,
    *,
    grace: float,
    ready_statuses: Collection[int] = (200,),
    final_statuses: Collection[int] = (),
  ) -> None:
    """Sends GETs for `path` until the server is ready.

    Args:
      path: the path of the health check.
      grace: seconds after which the wait ends with `NotReady`.
      ready_statuses: the statuses of a server that is ready.
      final_statuses: the statuses of a server that will never be ready.

    Raises:
      Failure: if the server answered with one of `final_statuses`.
      NotReady: if the server was not ready within `grace` seconds.
    """
    deadline = time.monotonic() + grace
    while True:
      left = max(deadline - time.monotonic(), PAUSES.health)
      try:
        await self.get(path, timeout=min(self.timeout, left))
        return
      except Failure as failure:
        if failure.status in ready_statuses:
          return
        if failure.status in final_statuses:
          raise
        if time.monotonic() + PAUSES.health > deadline:
          raise NotReady(
            f'{self.url} not ready within {grace} s: {failure}'
          ) from failure
      await asyncio.sleep(PAUSES.health)

  async def back_off(self, attempt: int, failure: Failure) -> None:
    """Waits before the next attempt, at least as long as Retry-After says.

    The pause doubles with each attempt and is multiplied by a random factor
    from 0.5 to 1.5, so that several clients do not all retry at the same time.

    Args:
      attempt: the number of the attempt that failed, from 0.
      failure: the error of that attempt.
    """
    pauses = PAUSES
    # The exponent is bounded because 2.0**1024 overflows. The pause reaches
    # `longest` at much smaller exponents.
    pause = min(pauses.first * 2.0 ** min(attempt, 64), pauses.longest)
    pause *= _JITTER.uniform(0.5, 1.5)
    retry_after = min(failure.retry_after, pauses.longest_retry_after)
    await asyncio.sleep(max(pause, retry_after))

  async def close(self) -> None:
    """Closes the connections."""
    keeper, self._keeper = self._keeper, None
    if keeper is not None:
      keeper.cancel()
      await asyncio.wait([keeper])

  def _connected(self) -> aiohttp.ClientSession:
    """Returns the session, which the first request opens."""
    if self._keeper is None:
      headers = {'Accept-Encoding': 'identity'}
      if self._token:
        headers['Authorization'] = f'Bearer {self._token}'
      self._session = aiohttp.ClientSession(
        headers=headers,
        # Otherwise a small compressed reply could fill the memory.
        auto_decompress=False,
        # `_slots` limits the number of requests. If aiohttp's pool limited it,
        # the wait for a connection would count towards the timeout.
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,  # no proxy from the environment
      )
      # If the loop cancels its tasks at its end, this task closes the session,
      # and nobody needs to call `close`.
      self._keeper = asyncio.create_task(_keep_open(self._session))
      _keepers.add(self._keeper)
      self._keeper.add_done_callback(_keepers.discard)
    return self._session

  async def _request(
    self, method: str, path: str, body: Any, timeout: float
  ) -> bytes:
    try:
      async with self._connected().request(
        method,
        yarl.URL(self.url + path, encoded=True),
        json=body,
        allow_redirects=False,
        timeout=aiohttp.ClientTimeout(total=timeout),
      ) as response:
        if response.status != 200:
          raise await self._failure_of_status(response)
        return await self._read(response)
    except (aiohttp.ClientError, OSError) as error:
      # This test comes first, because some timeouts of aiohttp are connection
      # errors, too.
      if isinstance(error, TimeoutError):
        line = f'no reply within {timeout:g} s'
        raise Failure(line, Cause.TIMEOUT) from error
      text, kind = one_line(str(error)), type(error).__name__
      raise Failure(
        f'{kind}: {text}' if text else kind, Cause.CONNECTION
      ) from error

  async def _read(self, response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
      body += chunk
      if len(body) > MAX_REPLY_BYTES:
        raise Failure(
          f'the reply exceeds {MAX_REPLY_BYTES} bytes', Cause.TOO_LARGE
        )
    return bytes(body)

  async def _failure_of_status(
    self, response: aiohttp.ClientResponse
  ) -> Failure:
    excerpt = b''
    # The excerpt only helps the reader of the message. So an error while it is
    # read must not hide the status.
    with contextlib.suppress(aiohttp.ClientError, OSError):
      excerpt = await response.content.read(4 * _EXCERPT)
    text = excerpt.decode('utf-8', 'replace')
    if self._token:  # A server may repeat the request's headers in its reply.
      text = text.replace(self._token, '***')
    text, status = one_line(text)[:_EXCERPT], response.status
    return Failure(
      f'status {status}: {text}' if text else f'status {status}',
      Cause.STATUS,
      status=status,
      retry_after=retry_after_seconds(response.headers.get('Retry-After')),
    )


def retry_after_seconds(value: str | None) -> float:
  """Returns the seconds that a Retry-After header (RFC 9110) asks to wait.

  Args:
    value: the header, which holds seconds or a date. The result is 0 if the
      header is absent or unreadable, or the date is in the past.
  """
  if value is None:
    return 0.0
  try:
    seconds = float(value)
  except ValueError:
    try:
      date = email_utils.parsedate_to_datetime(value)
    except (ValueError, OverflowError):  # not a date, or a date out of range
      return 0.0
    if date.tzinfo is None:
      date = date.replace(tzinfo=datetime.UTC)
    seconds = (date - datetime.datetime.now(datetime.UTC)).total_seconds()
  return max(seconds, 0.0) if math.isfinite(seconds) else 0.0


def one_line(text: str) -> str:
  """Returns a text on one line, without control characters."""
  return ' '.join(''.join(c if c.isprintable() else ' ' for c in text).split())


async def _keep_open(session: aiohttp.ClientSession) -> None:
  """Keeps a session open until the task is cancelled, and then closes it."""
  async with session:
    await asyncio.Event().wait()
