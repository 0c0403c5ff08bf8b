"""Sends requests to an inference server, and repeats requests that failed.

A request is repeated after a failed connection, a timeout, a server error, an
overload or a malformed reply. The pauses between attempts grow, and are never
shorter than the server's Retry-After. Every other failure is final.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from stppo_jax import exits
from stppo_jax.http import address
from stppo_jax.http import client as http_client
from stppo_jax.sampling.remote import dialects

TOKEN_VARIABLE = 'STPPO_ENGINE_TOKEN'

# HTTP statuses below 500 after which the server may accept the same request
# later.
_OVERLOADED = (408, 425, 429)

Result = TypeVar('Result')


class EngineError(Exception):
  """Raised if no attempt of a request succeeded; the message is one line."""


class EngineUnreachable(exits.RunEnded):
  """Raised if the server is not ready in time, or does not load the weights.

  A later attempt may succeed. The message is one line.
  """


class EngineUnsuited(ValueError):
  """Raised if a server cannot sample for this run; the message is one line."""

  exit_code = exits.USAGE


class EngineClient:
  """Sends requests to one server, and repeats requests that may still succeed.

  Attributes:
    url: the URL to which all paths are appended.
    num_retries: the number of repeated attempts so far.
  """

  def __init__(self, url: str, *, timeout: float, retries: int):
    """Makes a client; sends no request yet.

    If the environment variable STPPO_ENGINE_TOKEN is set, every request carries
    its value as a bearer token.

    Args:
      url: an http or https URL; a /v1 at its end is dropped.
      timeout: the number of seconds per attempt.
      retries: the most attempts after the first attempt of a request.

    Raises:
      ValueError: if the URL is not valid; the message is one line.
    """
    self.url = address.base_url(
      url, suffix='/v1', token_variable=TOKEN_VARIABLE
    )
    self.num_retries = 0
    self._timeout = timeout
    self._retries = retries
    # The client does not limit the requests in flight, because the engine does.
    self._http = http_client.Client(
      self.url, timeout=timeout, token_variable=TOKEN_VARIABLE
    )

  async def get(self, path: str, read: Callable[[bytes], Result]) -> Result:
    """Gets `path`, with retries, and returns the result of `read`."""
    return await self._retry(path, lambda: self._http.get(path), read)

  async def post(
    self, path: str, body: Any, read: Callable[[bytes], Result]
  ) -> Result:
    """Posts JSON values, with retries, and returns the result of `read`.

    Args:
      path: the path on the server.
      body: JSON values.
      read: reads the body of a reply with status 200. If it raises ValueError,
        the request is repeated; if it raises `BadReply`, the failure is final.

    Raises:
      EngineError: if every attempt failed, or if a failure was final.
    """
    return await self._retry(path, lambda: self._http.post(path, body), read)

  async def wait_until_ready(self) -> None:
    """Waits until the server answers /health with status 200.

    Raises:
      EngineUnreachable: if the server does not give this answer within the
        client's timeout, in seconds.
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
  """Returns whether a request that failed in this way would fail again."""
  if failure.cause is http_client.Cause.STATUS:
    return failure.status < 500 and failure.status not in _OVERLOADED
  return failure.cause is http_client.Cause.TOO_LARGE
