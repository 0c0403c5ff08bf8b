"""One request to a server, without the client of the package."""

import contextlib
import http.client
from urllib import parse


def send(url, path, body=b'', *, method='POST', headers=None):
  """Returns (status, headers, text) of one request."""
  host = parse.urlsplit(url).netloc
  connection = http.client.HTTPConnection(host, timeout=10)
  with contextlib.closing(connection):
    connection.request(method, path, body, headers or {})
    response = connection.getresponse()
    return response.status, response.headers, response.read().decode()
