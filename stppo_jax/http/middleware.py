"""The middlewares that every request passes on its way to a handler."""

import asyncio
import dataclasses
import hmac
import logging

from aiohttp import web

from stppo_jax.http import connections as connections_lib


@dataclasses.dataclass(frozen=True)
class Limits:
  """The limits of what clients may request.

  Attributes:
    max_body_bytes: the most bytes in the body of a request; a request with a
      larger body gets a reply with status 413.
    max_concurrent: the most POSTs that are answered at the same time; further
      POSTs get replies with status 429. A POST counts only after its body has
      come.
    retry_after: seconds in the header Retry-After of replies with status 429.
    body_timeout: seconds that a client may take to send a body.
    header_timeout: seconds that a client may take to send headers.
    max_connections: the most connections; half of the process's file
      descriptors is another limit. At the limit, a new connection closes the
      connection that has been idle for longest.
  """

  max_body_bytes: int = 1 << 20
  max_concurrent: int = 64
  retry_after: int = 1
  body_timeout: float = 30.0
  header_timeout: float = 10.0
  max_connections: int = 1024


class Refusal(Exception):
  """An error that the server answers with its status and one line."""

  def __init__(self, status: int, detail: str):
    super().__init__(detail)
    self.status = status


def answered(connections: connections_lib.Connections):
  """Returns the outermost middleware, which answers requests that failed.

  The middleware turns an error of a handler into a status and one line. It also
  tells the connection when a request begins and ends.
  """

  @web.middleware
  async def middleware(request: web.Request, handler) -> web.StreamResponse:
    headers: dict[str, str] = {}
    connection = connections.find(request.transport)
    if connection is None:
      raise web.HTTPBadRequest(text='the client has gone')
    connection.begin_request()
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
    finally:
      connection.end_request()
    detail = ' '.join(detail.split())
    return web.json_response({'detail': detail}, status=status, headers=headers)

  return middleware


def authorize(token: str):
  """Returns a middleware that requires a bearer token, unless `token` is ''."""
  # The tokens are compared as bytes, because compare_digest refuses text beyond
  # ASCII.
  expected = f'Bearer {token}'.encode()

  @web.middleware
  async def middleware(request: web.Request, handler) -> web.StreamResponse:
    sent = request.headers.get('Authorization', '').encode('utf-8', 'replace')
    is_open = not token or request.path == '/health'
    if not is_open and not hmac.compare_digest(sent, expected):
      raise web.HTTPUnauthorized(
        text='a valid bearer token is needed',
        headers={'WWW-Authenticate': 'Bearer'},
      )
    return await handler(request)

  return middleware


def bound(limits: Limits, connections: connections_lib.Connections):
  """Returns a middleware that reads bodies, and limits the POSTs in flight.

  A POST counts only after its body has come, so that slow clients do not use up
  the limit. GETs are quick and do not count.
  """
  in_flight = 0

  @web.middleware
  async def middleware(request: web.Request, handler) -> web.StreamResponse:
    nonlocal in_flight
    if request.method != 'POST':
      return await handler(request)
    # Most bodies come together with their headers. They are read without a
    # timer, because a timer would take longer than reading them.
    here = request.content.is_eof()
    try:
      async with asyncio.timeout(None if here else limits.body_timeout):
        await request.read()  # `request` keeps the body for the handler.
    except TimeoutError:
      raise Refusal(408, 'the body came too slowly') from None
    except (ConnectionError, web.RequestPayloadError):
      # The client has gone, or does not send HTTP.
      raise Refusal(400, 'the body is not complete') from None
    if in_flight >= limits.max_concurrent:
      raise web.HTTPTooManyRequests(
        text='too many requests in flight',
        headers={'Retry-After': str(limits.retry_after)},
      )
    connection = connections.find(request.transport)
    if connection is None:
      raise Refusal(400, 'the client has gone')
    in_flight += 1
    connection.is_busy = True
    try:
      return await handler(request)
    finally:
      in_flight -= 1
      connection.is_busy = False

  return middleware
