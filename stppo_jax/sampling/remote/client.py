"""Requests to an inference server, with retries.

A request is repeated after a failed connection, a timeout, a server error or an
overload, with pauses that grow and are never shorter than a Retry-After. Every
other failure is final.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from stppo_jax import exits
from stppo_jax.http import address
from stppo_jax.http import client as http_client
from stppo_jax.sampling.remote import dialects

TOKEN_VARIABLE = 'STPPO_ENGINE_TOKEN'

# The statuses below 500 of a server that may accept the same request later.
_OVERLOADED = (408, 425, 429)

Result = TypeVar('Result')


class EngineError(Exception):
  """Raised if a request and its retries failed; the message is one line."""


class EngineUnreachable(exits.RunEnded):
  """Raised, in one line, if no server was ready in time; one may be later."""


class EngineUnsuited(ValueError):
  """Raised, in one line, if a server cannot sample for this run."""

  exit_code = exits.USAGE


class EngineClient:
  """Sends requests to one server and repeats those that may still succeed.

  Attributes:
    url: the URL that all paths are appended to.
    num_retries: the number of repeated attempts since the start.
  """

  def __init__(self, url: str, *, timeout: float, retries: int):
    """Makes a client; nothing is sent yet.

    A bearer token in the environment (STPPO_ENGINE_TOKEN) is sent along.

    Args:
      url: http or https; a /v1 at its end is dropped.
      timeout: seconds per attempt.
      retries: the most attempts beyond the first one.

    Raises:
      ValueError: if the URL is not valid; the message is one line.
    """
    self.url = address.base_url(
      url, suffix='/v1', token_variable=TOKEN_VARIABLE
    )
    self.num_retries = 0
    self._timeout = timeout
    self._retries = retries
    # The engine bounds the requests in flight.
    self._http = http_client.Client(
      self.url, timeout=timeout, token_variable=TOKEN_VARIABLE
    )

  async def get(self, path: str, read: Callable[[bytes], Result]) -> Result:
    """Gets `path` until the reply can be read; see `post`."""
    return await self._retry(path, lambda: self._http.get(path), read)

  async def post(
    self, path: str, body: Any, read: Callable[[bytes], Result]
  ) -> Result:
    """Posts JSON values until the reply can be read.

    Args:
      path: the path on the server.
      body: JSON values.
      read: reads the body of a 200. After a ValueError the request is repeated,
        after a `BadReply` it is not.

    Raises:
      EngineError: if every attempt failed, or one failed in a final way.
    """
    return await self._retry(path, lambda: self._http.post(path, body), read)

  async def wait_until_ready(self) -> None:
    """Gets /health until the server answers with 200.

    Raises:
      EngineUnreachable: if the server did not within `timeout` seconds.
    """
    try:
      await self._http.wait_until_ready('/health', grace=self._timeout)
    except http_client.NotReady as error:
      raise EngineUnreachable(f'engine {error}') from error

  async def _retry(
    self,
    path: str,
    request: Callable[[], Awaitable[bytes]],
    read: Callable[[bytes], Result],
  ) -> Result:
    attempt = 0
    while True:
      try:
        return read(await request())
      except http_client.Failure as error:
        failure, final = error, _is_final(error)
      except ValueError as error:
        failure = http_client.Failure(
          http_client.one_line(str(error)), http_client.Cause.MALFORMED
        )
        final = isinstance(error, dialects.BadReply)
      if final or attempt == self._retries:
        raise EngineError(
          f'{self.url}{path}: {failure} (attempt {attempt + 1})'
        ) from failure
      self.num_retries += 1
      await self._http.back_off(attempt, failure)
      attempt += 1


def _is_final(failure: http_client.Failure) -> bool:
  """Returns whether another attempt would fail in the same way."""
  if failure.cause is http_client.Cause.STATUS:
    return failure.status < 500 and failure.status not in _OVERLOADED
  return failure.cause is http_client.Cause.TOO_LARGE
