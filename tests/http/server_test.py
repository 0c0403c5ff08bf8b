"""An embedded server: an error at its start is the caller's, and ends it."""

import threading
import urllib.error
import urllib.request

from aiohttp import web
import pytest

from stppo_jax.http import server as http_server


def _fails(make_app, error, line):
  embedded = http_server.EmbeddedServer(make_app)
  with pytest.raises(error, match=line):
    embedded.__enter__()
  embedded._thread.join(timeout=10)
  assert not embedded._thread.is_alive()


def test_what_cannot_be_made_fails_where_it_is_entered():
  def make_app():
    raise ValueError('no passages')

  _fails(make_app, ValueError, 'no passages')


def test_what_cannot_listen_is_cleaned_up(monkeypatch):
  # Of addresses that are for documents, and nobody's.
  monkeypatch.setattr(http_server, 'LOOPBACK', '192.0.2.1')
  cleaned = []

  async def clean_up(app):
    cleaned.append(app)

  def make_app():
    app = http_server.application(1)
    app.on_cleanup.append(clean_up)
    return app

  _fails(make_app, OSError, '192.0.2.1')
  assert len(cleaned) == 1


def test_it_serves_until_it_is_left():
  async def hello(request):
    assert threading.current_thread() is not threading.main_thread()
    return web.json_response(await http_server.json_object(request, 5.0))

  def make_app():
    app = http_server.application(10)
    app.router.add_post('/', hello)
    return app

  with http_server.EmbeddedServer(make_app) as embedded:
    with urllib.request.urlopen(embedded.url, b'{"a": 1}', timeout=10) as reply:
      assert reply.read() == b'{"a": 1}'
    for body, status in ((b'[]', 422), (b'[0, 1, 2, 3]', 413)):
      with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(embedded.url, body, timeout=10)
      assert caught.value.code == status
      assert caught.value.read().startswith(b'{"detail": "')
  with pytest.raises(urllib.error.URLError):
    urllib.request.urlopen(embedded.url, b'{}', timeout=10)
