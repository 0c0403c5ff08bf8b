"""One request over HTTP, and a name for every way it can fail."""

from collections.abc import AsyncGenerator
import os
from typing import Any

import aiohttp
import yarl

from stppo_jax.retrieval import address
from stppo_jax.retrieval import replies

_MAX_REPLY_BYTES = 64 << 20
# Waiting will not change these: they are about the address or the token.
_PERMANENT = frozenset({401, 403, 404, 405})
# The server is overloaded or away; what was asked is not to blame.
_OVERLOADED = frozenset({408, 429, 502, 503, 504})


class Failure(Exception):
  """One request failed; the message is one line.

  Attributes:
    permanent: asking again is of no use.
    suspicious: one of the queries may be to blame: ask in smaller parts.
    retry_after: seconds the server asked to wait; 0 = did not.
  """

  def __init__(
    self, line, *, permanent=False, suspicious=False, retry_after=0.0
  ):
    super().__init__(line)
    self.permanent = permanent
    self.suspicious = suspicious
    self.retry_after = retry_after


async def sessions() -> AsyncGenerator[aiohttp.ClientSession, None]:
  """Yields one session and closes it when the generator is closed.

  The event loop closes a suspended generator before it ends; nothing else
  tells us that it does, and a session must not outlive its loop.
  """
  headers = {'Accept-Encoding': 'identity'}
  token = os.environ.get(address.TOKEN_VARIABLE, '')
  if token:
    headers['Authorization'] = f'Bearer {token}'
  async with aiohttp.ClientSession(
    headers=headers,
    auto_decompress=False,  # A small reply must not grow large in memory.
    cookie_jar=aiohttp.DummyCookieJar(),
    trust_env=False,  # no proxy from the environment
  ) as session:
    yield session


async def post(
  session: aiohttp.ClientSession, url: str, body: Any, *, timeout: float
) -> bytes:
  """Posts JSON and returns the reply of a 200.

  Args:
    session: of `sessions`.
    url: taken as it is.
    body: JSON values.
    timeout: seconds for all of it.

  Raises:
    Failure: whatever else the network or the server did.
  """
  try:
    async with session.post(
      yarl.URL(url, encoded=True),
      json=body,
      allow_redirects=False,
      timeout=aiohttp.ClientTimeout(total=timeout),
    ) as response:
      if response.status != 200:
        raise _failure_of_status(response)
      return await _read(response)
  except (aiohttp.ClientError, OSError) as error:
    timed_out = isinstance(error, TimeoutError)
    raise Failure(_line(error), suspicious=timed_out) from error


async def why_not_ready(
  session: aiohttp.ClientSession, url: str, *, timeout: float
) -> str:
  """Asks /health; '' if the server is ready, else the reason in one line.

  A server without /health that answers at all is ready: the original one has
  none, and listens only once its index is loaded.
  """
  try:
    async with session.get(
      yarl.URL(f'{url}/health', encoded=True),
      allow_redirects=False,
      timeout=aiohttp.ClientTimeout(total=timeout),
    ) as response:
      ready = response.status in (200, 404, 405)
      return '' if ready else f'status {response.status}'
  except (aiohttp.ClientError, OSError) as error:
    return _line(error)


def _failure_of_status(response: aiohttp.ClientResponse) -> Failure:
  status = response.status
  return Failure(
    f'status {status}',
    permanent=status in _PERMANENT or 300 <= status < 400,
    suspicious=status not in _OVERLOADED,
    retry_after=replies.retry_after_seconds(
      response.headers.get('Retry-After')
    ),
  )


async def _read(response: aiohttp.ClientResponse) -> bytes:
  """The body; `Failure` if it is too large."""
  body = bytearray()
  async for chunk in response.content.iter_any():
    body += chunk
    if len(body) > _MAX_REPLY_BYTES:
      raise Failure(
        f'the reply exceeds {_MAX_REPLY_BYTES} bytes', suspicious=True
      )
  return bytes(body)


def _line(error: BaseException) -> str:
  text = ' '.join(str(error).split())
  return f'{type(error).__name__}: {text}' if text else type(error).__name__
