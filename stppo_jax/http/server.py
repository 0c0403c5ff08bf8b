"""What our HTTP servers share: where they listen, and how they refuse.

Every error is one line, `{"detail": "..."}`. No reply carries a traceback.
"""

import asyncio
from collections.abc import Callable
from concurrent import futures
import json
import logging
import threading
from typing import Any

from aiohttp import web

LOOPBACK = '127.0.0.1'


async def start(
  app: web.Application, host: str, port: int
) -> tuple[web.AppRunner, str]:
  """Serves in the running loop. Returns the runner, to clean up, and the URL.

  Args:
    app: what is served.
    host: address to bind; who is to reach it is for the caller to check.
    port: 0 takes a free one.

  Raises:
    OSError: the address is taken or is not ours.
  """
  # Idle connections of clients that are gone must not delay the end.
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
    make_app: is called on that thread.

  Attributes:
    url: where it listens, once entered.
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
    self.url, self._stop = started.result()
    return self

  def __exit__(self, *_) -> None:
    self._stop()
    self._thread.join()

  async def _serve(self, started: futures.Future) -> None:
    """Serves until told to stop; hands errors at the start to `started`."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    try:
      runner, url = await start(self._make_app(), LOOPBACK, 0)
    except BaseException as error:
      started.set_exception(error)
      return
    started.set_result((url, lambda: loop.call_soon_threadsafe(stopping.set)))
    try:
      await stopping.wait()
    finally:
      await runner.cleanup()


def application(max_body_bytes: int) -> web.Application:
  """An empty one: 413 above so many bytes, and every error in one line."""
  return web.Application(
    client_max_size=max_body_bytes, middlewares=[_one_line]
  )


@web.middleware
async def _one_line(request: web.Request, handler) -> web.StreamResponse:
  """Turns whatever is raised into a status and one line."""
  try:
    return await handler(request)
  except web.HTTPException as error:
    headers = dict(error.headers)
    headers.pop('Content-Type', None)
    headers.pop('Content-Length', None)
    status, detail = error.status, error.text or error.reason
  except Exception:
    # The cause is for our log, not for the client.
    logging.getLogger(__name__).exception('request failed: %s', request.path)
    headers, status, detail = {}, 500, 'internal error'
  detail = ' '.join(detail.split())
  return web.json_response({'detail': detail}, status=status, headers=headers)


async def json_object(request: web.Request, timeout: float) -> dict[str, Any]:
  """The fields of a body.

  Args:
    request: its body is read.
    timeout: seconds a client may take to send it.

  Raises:
    web.HTTPException: 408 slow body, 413 body too large, 422 no JSON object.
  """
  try:
    async with asyncio.timeout(timeout):
      body = json.loads(await request.read())
  except TimeoutError:
    raise web.HTTPRequestTimeout(text='the body came too slowly') from None
  except (ValueError, RecursionError):
    raise unprocessable('body: expected JSON in UTF-8') from None
  if not isinstance(body, dict):
    raise unprocessable('body: expected a JSON object')
  return body


def unprocessable(line: str) -> web.HTTPException:
  """422, to be raised."""
  return web.HTTPUnprocessableEntity(text=line)


def too_many(retry_after: int) -> web.HTTPException:
  """429, to be raised; `retry_after` in seconds."""
  return web.HTTPTooManyRequests(
    text='too many requests under way',
    headers={'Retry-After': str(retry_after)},
  )
