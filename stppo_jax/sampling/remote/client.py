"""Requests to an inference server, made to outlive a bad network.

Connections, timeouts, server errors and overload are tried again, with pauses
that grow and never undercut a Retry-After; whatever else a server says against
a request stands.
"""

import asyncio
from collections.abc import Awaitable
from collections.abc import Callable
from collections.abc import Coroutine
from collections.abc import Sequence
import concurrent.futures
import math
import os
import random
import time
from typing import Any
from typing import Protocol
from typing import TypeVar
from urllib import parse
import weakref

import aiohttp
import yarl

from stppo_jax.sampling.remote import dialects

TOKEN_VARIABLE = 'STPPO_ENGINE_TOKEN'

_MAX_REPLY_BYTES = 64 << 20
_BACKOFF = 0.25  # seconds before the first retry, doubled for each further one
_MAX_BACKOFF = 8.0  # seconds
_MAX_RETRY_AFTER = 60.0  # seconds: a wrong clock must not stop the run
_HEALTH_PERIOD = 0.2  # seconds between looks at a server that is not up
_EXCERPT = 200  # characters of a server's own words
# Of the refusals, those that pass.
_OVERLOADED = (408, 425, 429)

Result = TypeVar('Result')


class Loop(Protocol):
  """See `rollout.event_loop.EventLoop`."""

  def submit(
    self, coroutines: Sequence[Coroutine[Any, Any, Result]]
  ) -> list[concurrent.futures.Future[Result]]: ...
  def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result: ...


class EngineError(Exception):
  """A request failed, its retries included; one line."""


class EngineUnreachable(Exception):
  """No server answered in time: try again; one line."""

  exit_code = 75


class EngineUnsuited(ValueError):
  """The server cannot play this run; one line."""

  exit_code = 2


class Failure(Exception):
  """One attempt failed; one line.

  Attributes:
    permanent: asking again is of no use.
    retry_after: seconds the server asked to wait; 0 = did not.
  """

  def __init__(self, line: str, *, permanent=False, retry_after=0.0):
    super().__init__(line)
    self.permanent = permanent
    self.retry_after = retry_after


class Client:
  """One server; all coroutines run on the loop's thread.

  Its connections live in a task of the loop, and close with either of them.
  A bearer token in the environment (STPPO_ENGINE_TOKEN) is sent along.

  Args:
    loop: of the run.
    url: http or https; a /v1 at its end is dropped.
    timeout: seconds per attempt.
    retries: beyond the first attempt.

  Attributes:
    url: what all paths begin with.
    timeout: seconds per attempt.
    num_retries: further attempts since the start.

  Raises:
    ValueError: bad URL; one line.
  """

  def __init__(self, loop: Loop, url: str, *, timeout: float, retries: int):
    self.url = _base_of(url)
    self.timeout = timeout
    self.num_retries = 0
    self._retries = retries
    self._random = random.Random()
    opened = concurrent.futures.Future[aiohttp.ClientSession]()
    (keeper,) = loop.submit([_keep_open(opened)])
    weakref.finalize(self, keeper.cancel)
    self._session = opened.result()

  async def get(self, path: str, *, timeout: float | None = None) -> bytes:
    """One attempt; the body of a 200. Raises `Failure`."""
    return await self._request('GET', path, None, timeout or self.timeout)

  async def post(
    self,
    path: str,
    body: Any,
    read: Callable[[bytes], Result],
  ) -> Result:
    """Posts JSON until the reply can be read.

    Args:
      path: on the server.
      body: JSON values.
      read: of the body of a 200. A ValueError is tried again, an `Unfaithful`
        is not.

    Raises:
      EngineError: not within the retries.
    """

    async def attempt():
      reply = await self._request('POST', path, body, self.timeout)
      try:
        return read(reply)
      except ValueError as error:
        wrong = isinstance(error, dialects.BadReply)
        raise Failure(str(error), permanent=wrong) from error

    return await self.retried(path, attempt)

  async def retried(
    self, path: str, attempt: Callable[[], Awaitable[Result]]
  ) -> Result:
    """The result of the first attempt that does not fail.

    Raises:
      EngineError: none of them.
    """
    for number in range(self._retries + 1):
      try:
        return await attempt()
      except Failure as failure:
        if failure.permanent or number == self._retries:
          raise EngineError(
            f'{self.url}{path}: {failure} (attempt {number + 1})'
          ) from failure
        pause = self._pause(number, failure)
      self.num_retries += 1
      await asyncio.sleep(pause)
    raise AssertionError('a loop without an attempt')

  async def wait_until_ready(self) -> None:
    """Asks /health until it answers 200.

    Raises:
      EngineUnreachable: not within `timeout` seconds.
    """
    deadline = time.monotonic() + self.timeout
    while True:
      left = max(deadline - time.monotonic(), _HEALTH_PERIOD)
      try:
        await self.get('/health', timeout=left)
        return
      except Failure as failure:
        if time.monotonic() + _HEALTH_PERIOD > deadline:
          raise EngineUnreachable(
            f'engine {self.url} not ready within {self.timeout} s: {failure}'
          ) from failure
      await asyncio.sleep(_HEALTH_PERIOD)

  def _pause(self, number: int, failure: Failure) -> float:
    """Seconds; jittered, lest all rows return at once."""
    pause = min(_BACKOFF * 2**number, _MAX_BACKOFF)
    pause *= self._random.uniform(0.5, 1.5)
    return max(pause, min(failure.retry_after, _MAX_RETRY_AFTER))

  async def _request(
    self, method: str, path: str, body: Any, timeout: float
  ) -> bytes:
    try:
      async with self._session.request(
        method,
        yarl.URL(self.url + path, encoded=True),
        json=body,
        allow_redirects=False,
        timeout=aiohttp.ClientTimeout(total=timeout),
      ) as response:
        reply = await _read(response)
        if response.status != 200:
          raise _failure_of(response, reply)
        return reply
    except (aiohttp.ClientError, OSError) as error:
      text = _one_line(str(error))
      kind = type(error).__name__
      raise Failure(f'{kind}: {text}' if text else kind) from error


async def _keep_open(opened: concurrent.futures.Future) -> None:
  """Hands a session to `opened`, and closes it when cancelled."""
  token = os.environ.get(TOKEN_VARIABLE, '')
  async with aiohttp.ClientSession(
    headers={'Authorization': f'Bearer {token}'} if token else {},
    # The engine says how many requests are under way.
    connector=aiohttp.TCPConnector(limit=0),
    cookie_jar=aiohttp.DummyCookieJar(),
    trust_env=False,  # no proxy from the environment
  ) as session:
    opened.set_result(session)
    await asyncio.Event().wait()


async def _read(response: aiohttp.ClientResponse) -> bytes:
  """The body; `Failure` if it is too large."""
  body = bytearray()
  async for chunk in response.content.iter_any():
    body += chunk
    if len(body) > _MAX_REPLY_BYTES:
      raise Failure(
        f'the reply exceeds {_MAX_REPLY_BYTES} bytes', permanent=True
      )
  return bytes(body)


def _failure_of(response: aiohttp.ClientResponse, reply: bytes) -> Failure:
  status = response.status
  said = _one_line(reply[: 4 * _EXCERPT].decode('utf-8', 'replace'))[:_EXCERPT]
  return Failure(
    f'status {status}: {said}' if said else f'status {status}',
    permanent=status < 500 and status not in _OVERLOADED,
    retry_after=_seconds(response.headers.get('Retry-After')),
  )


def _seconds(retry_after: str | None) -> float:
  """Of a Retry-After header; 0 where it is absent, a date or unreadable."""
  try:
    seconds = float(retry_after or 0)
  except ValueError:
    return 0.0
  return max(seconds, 0.0) if math.isfinite(seconds) else 0.0


def _one_line(text: str) -> str:
  return ' '.join(''.join(c if c.isprintable() else ' ' for c in text).split())


def _base_of(url: str) -> str:
  try:
    parts = parse.urlsplit(url)
    wrong = parts.scheme not in ('http', 'https') or not parts.hostname
    wrong |= parts.port == 0
  except ValueError as error:
    raise ValueError(f'{url!r} is no URL: {error}') from error
  if wrong or any(c.isspace() or not c.isprintable() for c in url):
    raise ValueError(f'{url!r} is no http:// or https:// URL')
  if parts.username is not None or parts.password is not None:
    raise ValueError(
      'user and password in the URL are not allowed; set a bearer token in '
      f'{TOKEN_VARIABLE}'
    )
  if parts.query or parts.fragment:
    raise ValueError(f'{url!r} has a query or a fragment')
  return url.rstrip('/').removesuffix('/v1').rstrip('/')
