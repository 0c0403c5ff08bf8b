"""The HTTP server under the retrieval server and the inference server.

A handler takes the JSON object of a request and returns the JSON object of the
reply; it raises `Refusal` to answer with another status. Every error is one
line, `{"detail": "..."}`, and no reply carries a traceback:

    401  no valid bearer token (with `token`; /health needs none)
    408  the body came too slowly
    413  the body is too large
    422  the body is not a JSON object
    429  too many requests in flight, with Retry-After
    500  a bug in a handler, whose cause is in the server's log only
"""

import asyncio
from collections.abc import Awaitable
from collections.abc import Callable
from collections.abc import Mapping
from concurrent import futures
import dataclasses
import hmac
import ipaddress
import json
import logging
import threading
from typing import Any

from aiohttp import web

LOOPBACK = '127.0.0.1'

Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Limits:
  """The limits of what clients may request.

  Attributes:
    max_body_bytes: the largest body of a request; above it, 413.
    max_concurrent: the most posts in flight; above it, 429.
    retry_after: seconds that a 429 names in Retry-After.
    body_timeout: seconds that a client may take to send a body.
  """

  max_body_bytes: int = 1 << 20
  max_concurrent: int = 64
  retry_after: int = 1
  body_timeout: float = 30.0


class Refusal(Exception):
  """An error that is answered with its status and one line."""

  def __init__(self, status: int, detail: str):
    super().__init__(detail)
    self.status = status


def application(
  *,
  get: Mapping[str, Callable[[], Fields]],
  post: Mapping[str, Callable[..., Awaitable[Fields]]],
  limits: Limits,
  close: Callable[[], None],
  token: str = '',
) -> web.Application:
  """Returns a server as an aiohttp application; /health is added.

  Args:
    get: path -> handler without arguments.
    post: path -> handler of the body; what the path matches in braces is passed
      by keyword.
    limits: the limits of what clients may request.
    close: called when the server ends.
    token: the bearer token that every request but /health needs; '' = none.
  """

  async def on_cleanup(app: web.Application) -> None:
    del app
    close()

  app = web.Application(
    client_max_size=limits.max_body_bytes,
    middlewares=[_one_line, _authorize(token), _bound(limits)],
  )
  for path, get_handler in {'/health': _health, **get}.items():
    app.router.add_get(path, _answer_get(get_handler))
  for path, post_handler in post.items():
    app.router.add_post(path, _answer_post(post_handler, limits.body_timeout))
  app.on_cleanup.append(on_cleanup)
  return app


def check_exposure(host: str, token: str, *, token_variable: str) -> None:
  """Refuses to serve other machines without a token.

  Args:
    host: the address to bind.
    token: the bearer token that requests need; '' = none.
    token_variable: the environment variable that the message recommends.

  Raises:
    ValueError: host is not a loopback address and there is no token.
  """
  try:
    loopback = ipaddress.ip_address(host).is_loopback
  except ValueError:
    loopback = host == 'localhost'
  if not loopback and not token:
    raise ValueError(
      f'host {host!r} can be reached from other machines: set a bearer token '
      f'in {token_variable}, or serve on {LOOPBACK}'
    )


async def start(
  app: web.Application, host: str, port: int
) -> tuple[web.AppRunner, str]:
  """Serves in the running loop; returns the runner, to clean up, and the URL.

  Args:
    app: the application to serve.
    host: the address to bind; see `check_exposure`.
    port: the port to bind; 0 = any free one.

  Raises:
    OSError: the address is in use or does not belong to this machine.
  """
  # Idle connections must not delay the shutdown.
  runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
  try:
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
  except BaseException:
    await runner.cleanup()
    raise
  bound_port = runner.addresses[0][1]
  name = f'[{host}]' if ':' in host else host
  return runner, f'http://{name}:{bound_port}'


class EmbeddedServer:
  """A server on a thread and an event loop of its own, on a loopback port.

      with EmbeddedServer(make_app) as server:
        client = Client(server.url, ...)

  Args:
    make_app: makes the application; called on that thread.
    host: the loopback address to bind.

  Attributes:
    url: the server's URL, once entered.
  """

  def __init__(
    self, make_app: Callable[[], web.Application], *, host: str = LOOPBACK
  ):
    self._make_app = make_app
    self._host = host
    self.url = ''

  def __enter__(self) -> 'EmbeddedServer':
    started: futures.Future[tuple[str, Callable[[], Any]]] = futures.Future()
    self._thread = threading.Thread(
      target=lambda: asyncio.run(self._serve(started)),
      name='embedded-server',
      daemon=True,
    )
    self._thread.start()
    try:
      self.url, self._stop = started.result()
    except BaseException:
      self._thread.join()
      raise
    return self

  def __exit__(self, *_) -> None:
    self._stop()
    self._thread.join()

  async def _serve(self, started: futures.Future) -> None:
    """Serves until it is stopped; sets `started` to the URL or an error.

    `__enter__` waits for `started` on another thread: an error at the start is
    raised there, and `stop` reaches this loop by `call_soon_threadsafe`.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    try:
      runner, url = await start(self._make_app(), self._host, 0)
    except BaseException as error:
      started.set_exception(error)
      return
    started.set_result((url, lambda: loop.call_soon_threadsafe(stopping.set)))
    try:
      await stopping.wait()
    finally:
      await runner.cleanup()


def _health() -> Fields:
  return {'status': 'ok'}


def _answer_get(handler: Callable[[], Fields]):
  async def answer(request: web.Request) -> web.Response:
    del request
    return web.json_response(handler())

  return answer


def _answer_post(
  handler: Callable[..., Awaitable[Fields]], body_timeout: float
):
  async def answer(request: web.Request) -> web.Response:
    fields = await _json_object(request, body_timeout)
    return web.json_response(await handler(fields, **request.match_info))

  return answer


async def _json_object(request: web.Request, timeout: float) -> Fields:
  """Returns the fields of a body; raises a `web.HTTPException` or `Refusal`."""
  try:
    async with asyncio.timeout(timeout):
      body = json.loads(await request.read())
  except TimeoutError:
    raise Refusal(408, 'the body came too slowly') from None
  except (ValueError, RecursionError):
    raise Refusal(422, 'body: expected JSON in UTF-8') from None
  if not isinstance(body, dict):
    raise Refusal(422, 'body: expected a JSON object')
  return body


@web.middleware
async def _one_line(request: web.Request, handler) -> web.StreamResponse:
  """Turns whatever a handler raises into a status and one line."""
  headers: dict[str, str] = {}
  try:
    return await handler(request)
  except Refusal as refusal:
    status, detail = refusal.status, str(refusal)
  except web.HTTPException as error:
    headers = dict(error.headers)
    headers.pop('Content-Type', None)
    headers.pop('Content-Length', None)
    status, detail = error.status, error.text or error.reason
  except Exception:
    logging.getLogger(__name__).exception('request failed: %s', request.path)
    status, detail = 500, 'internal error'
  detail = ' '.join(detail.split())
  return web.json_response({'detail': detail}, status=status, headers=headers)


def _authorize(token: str):
  # Compared as bytes: compare_digest refuses text beyond ASCII.
  expected = f'Bearer {token}'.encode()

  @web.middleware
  async def authorize(request: web.Request, handler) -> web.StreamResponse:
    """Refuses requests without the token, compared in constant time."""
    sent = request.headers.get('Authorization', '').encode('utf-8', 'replace')
    is_open = not token or request.path == '/health'
    if not is_open and not hmac.compare_digest(sent, expected):
      raise web.HTTPUnauthorized(
        text='a valid bearer token is needed',
        headers={'WWW-Authenticate': 'Bearer'},
      )
    return await handler(request)

  return authorize


def _bound(limits: Limits):
  in_flight = 0

  @web.middleware
  async def bound(request: web.Request, handler) -> web.StreamResponse:
    """Refuses posts beyond the limit; gets are quick and not counted."""
    nonlocal in_flight
    if request.method != 'POST':
      return await handler(request)
    if in_flight >= limits.max_concurrent:
      raise web.HTTPTooManyRequests(
        text='too many requests in flight',
        headers={'Retry-After': str(limits.retry_after)},
      )
    in_flight += 1
    try:
      return await handler(request)
    finally:
      in_flight -= 1

  return bound
