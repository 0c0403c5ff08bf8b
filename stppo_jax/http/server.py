"""The HTTP server on which the retrieval server is built.

A handler takes the JSON object of a request and returns the JSON object of the
reply. It raises `Refusal` to answer with a status other than 200. Every error
is one line, `{"detail": "..."}`, and no reply contains a traceback:

    401  no valid bearer token (with `token`; /health needs none)
    408  the body came too slowly
    413  the body is too large
    422  the body is not a JSON object
    429  too many requests in flight, with Retry-After
    500  a bug in a handler; the traceback is in the server's log only

GET /health answers {"status": "ok"}. `connections.py` limits the number of
connections, and the time for the headers of a request.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent import futures
import contextlib
import ipaddress
import json
import socket
import threading
from typing import Any

from aiohttp import web

from stppo_jax.http import connections as connections_lib
from stppo_jax.http import middleware

LOOPBACK = '127.0.0.1'

# The most connections that wait in the operating system to be accepted.
_BACKLOG = 1024
_KEEPALIVE = 75.0  # seconds that an idle connection is kept open
_CONNECTIONS = web.AppKey('connections', connections_lib.Connections)

Fields = dict[str, Any]


# Modules that use the server find these two classes of `middleware` here.
Limits = middleware.Limits
Refusal = middleware.Refusal


def application(
  *,
  post: Mapping[str, Callable[..., Awaitable[Fields]]],
  limits: Limits,
  close: Callable[[], None],
  token: str = '',
) -> web.Application:
  """Returns an aiohttp application with POST handlers and GET /health.

  Args:
    post: the handler of each path. A handler takes the JSON object of the body,
      and as keyword arguments the variables that the path has in braces.
    limits: the limits of what clients may request.
    close: a function that is called when the server ends.
    token: the bearer token that requests need, except for /health; '' if no
      token is needed.
  """

  async def on_cleanup(app: web.Application) -> None:
    del app
    close()

  connections = connections_lib.Connections(
    max_connections=limits.max_connections, header_timeout=limits.header_timeout
  )
  app = web.Application(
    client_max_size=limits.max_body_bytes,
    middlewares=[
      middleware.answered(connections),
      middleware.authorize(token),
      middleware.bound(limits, connections),
    ],
  )
  app[_CONNECTIONS] = connections
  app.router.add_get('/health', _health)
  for path, handler in post.items():
    app.router.add_post(path, _answer(handler))
  app.on_cleanup.append(on_cleanup)
  return app


def require(is_fine: bool, line: str) -> None:
  """Raises `Refusal` with status 422 if `is_fine` is False.

  Args:
    is_fine: whether the request is fine.
    line: the message of the refusal.
  """
  if not is_fine:
    raise Refusal(422, line)


def check_exposure(host: str, token: str, *, token_variable: str) -> None:
  """Raises ValueError if other machines could send requests without a token.

  Args:
    host: the address to bind.
    token: the bearer token that requests need; '' if no token is needed.
    token_variable: the environment variable that the message recommends.

  Raises:
    ValueError: if host is not a loopback address and there is no token.
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


def listen(host: str, port: int) -> socket.socket:
  """Returns a socket that is bound to an address and not listening yet.

  Raises:
    OSError: if the address is in use or does not belong to this machine.
  """
  found = socket.getaddrinfo(
    host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
  )
  # `localhost` may have an IPv4 and an IPv6 address; IPv4 is preferred.
  found.sort(key=lambda entry: entry[0] != socket.AF_INET)
  family, kind, protocol, _, name = found[0]
  bound = socket.socket(family, kind, protocol)
  try:
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(name)
  except OSError as error:
    bound.close()
    raise OSError(error.errno, f'{host}:{port}: {error.strerror}') from error
  return bound


def url_of(bound: socket.socket, host: str) -> str:
  """Returns the URL of a server that listens on a socket."""
  name = f'[{host}]' if ':' in host else host
  return f'http://{name}:{bound.getsockname()[1]}'


@contextlib.asynccontextmanager
async def serving(
  app: web.Application,
  host: str,
  port: int,
  *,
  bound: socket.socket | None = None,
  shutdown_timeout: float = 1.0,
) -> AsyncIterator[str]:
  """Serves an application in the running event loop, and yields its URL.

  At the end, the server waits for the requests in flight.

  Args:
    app: the application to serve.
    host: the address to bind; see `check_exposure`.
    port: the port to bind; 0 for any free port.
    bound: a socket that is bound to host and port already; None for a new
      socket. The socket is closed at the end.
    shutdown_timeout: seconds that requests in flight may take at the end.

  Raises:
    OSError: if the address is in use or does not belong to this machine.
  """
  runner = web.AppRunner(
    app,
    access_log=None,
    keepalive_timeout=_KEEPALIVE,
    shutdown_timeout=shutdown_timeout,
  )
  try:
    await runner.setup()
    bound = bound or listen(host, port)
    make_protocol = runner.server
    assert make_protocol is not None  # `setup` has set `runner.server`
    if _CONNECTIONS in app:
      make_protocol = app[_CONNECTIONS].guard(make_protocol)
    server = await asyncio.get_running_loop().create_server(
      make_protocol, sock=bound, backlog=connections_lib.ACCEPTED_AT_ONCE
    )
    # The loop accepts few connections at once, so that there are never many
    # more connections than allowed. Further connections wait in the queue of
    # the operating system, which is made longer here.
    bound.listen(_BACKLOG)
    try:
      yield url_of(bound, host)
    finally:
      server.close()
  finally:
    if bound is not None:
      bound.close()
    await runner.cleanup()


class EmbeddedServer:
  """A server on a loopback port, with its own thread and event loop.

      with EmbeddedServer(make_app) as server:
        client = Client(server.url, ...)

  Args:
    make_app: makes the application; called on the server's thread.

  Attributes:
    url: the server's URL; '' before the context is entered.
  """

  def __init__(self, make_app: Callable[[], web.Application]):
    self._make_app = make_app
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
    """Serves until another thread calls the function `stop`.

    The result of the future `started` becomes the pair of the URL and `stop`.
    If the start fails, the future gets the error, and `__enter__`, which waits
    for the future on the caller's thread, raises the error. The caller's thread
    also calls `stop`, so `stop` uses `call_soon_threadsafe`.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    stop = lambda: loop.call_soon_threadsafe(stopping.set)
    try:
      async with serving(self._make_app(), LOOPBACK, 0) as url:
        started.set_result((url, stop))
        await stopping.wait()
    except BaseException as error:
      if started.done():
        raise
      started.set_exception(error)


async def _health(request: web.Request) -> web.Response:
  del request
  return web.json_response({'status': 'ok'})


def _answer(handler: Callable[..., Awaitable[Fields]]):
  async def answer(request: web.Request) -> web.Response:
    fields = _json_object(await request.read())
    return web.json_response(await handler(fields, **request.match_info))

  return answer


def _json_object(body: bytes) -> Fields:
  """Returns the JSON object in a body; raises `Refusal` if there is none."""
  try:
    fields = json.loads(body)
  except (ValueError, RecursionError):
    raise Refusal(422, 'body: expected JSON in UTF-8') from None
  if not isinstance(fields, dict):
    raise Refusal(422, 'body: expected a JSON object')
  return fields
