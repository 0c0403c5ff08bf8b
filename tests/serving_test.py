"""An embedded server: an error at its start is the caller's, and ends it."""

import threading
import urllib.error
import urllib.request

from aiohttp import web
import pytest

from stppo_jax import serving


async def _late(app):
  raise OSError('no such device')


def _broken_at_once():
  raise ValueError('no passages')


def _broken_at_setup():
  app = serving.application(1)
  app.on_startup.append(_late)
  return app


@pytest.mark.parametrize(
  ('make_app', 'error'),
  [(_broken_at_once, ValueError), (_broken_at_setup, OSError)],
)
def test_an_error_at_the_start_leaves_nothing_behind(make_app, error):
  embedded = serving.EmbeddedServer(make_app)
  with pytest.raises(error, match='no '):
    embedded.__enter__()
  embedded._thread.join(timeout=10)
  assert not embedded._thread.is_alive()


def test_it_serves_until_it_is_left():
  async def hello(request):
    assert threading.current_thread() is not threading.main_thread()
    return web.json_response(await serving.json_object(request, 5.0))

  def make_app():
    app = serving.application(10)
    app.router.add_post('/', hello)
    return app

  with serving.EmbeddedServer(make_app) as embedded:
    with urllib.request.urlopen(embedded.url, b'{"a": 1}', timeout=10) as reply:
      assert reply.read() == b'{"a": 1}'
    for body, status in ((b'[]', 422), (b'[0, 1, 2, 3]', 413)):
      with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(embedded.url, body, timeout=10)
      assert caught.value.code == status
      assert caught.value.read().startswith(b'{"detail": "')
  with pytest.raises(urllib.error.URLError):
    urllib.request.urlopen(embedded.url, b'{}', timeout=10)
