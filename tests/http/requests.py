"""A server that echoes, and requests without the client of the package."""

import asyncio
import contextlib
import http.client
from urllib import parse

from stppo_jax.http import server as http_server


def application(post=None, *, closed=None, token='', **limits):
  """Returns an application of some handlers that also echoes at /echo.

  An echo waits for the `seconds` of its request. At its end, the application
  adds to the list `closed`.
  """

  async def echo(fields):
    await asyncio.sleep(fields['seconds'] if 'seconds' in fields else 0.0)
    return fields

  return http_server.application(
    post={'/echo': echo, **(post or {})},
    limits=http_server.Limits(**limits),
    close=lambda: None if closed is None else closed.append(True),
    token=token,
  )


def serve(*args, **options):
  """Returns a server of `application`."""
  return http_server.EmbeddedServer(lambda: application(*args, **options))


def send(url, path, body=b'', *, method='POST', headers=None):
  """Returns (status, headers, text) of one request."""
  host = parse.urlsplit(url).netloc
  connection = http.client.HTTPConnection(host, timeout=10)
  with contextlib.closing(connection):
    connection.request(method, path, body, headers or {})
    response = connection.getresponse()
    return response.status, response.headers, response.read().decode()
