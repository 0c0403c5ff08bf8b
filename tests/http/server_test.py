"""The HTTP server: its refusals, their messages, its start and its end."""

import asyncio
from concurrent import futures
import gc
import json
import threading
from urllib import parse

import pytest

from stppo_jax.http import server as http_server
from tests.http import requests

_LIMITS = http_server.Limits(
  max_body_bytes=20, max_concurrent=1, retry_after=7, body_timeout=0.2
)


def _app(*, closed=None, token=''):
  """Returns an application that echoes at /echo and fails at /broken."""

  async def echo(fields):
    assert threading.current_thread() is not threading.main_thread()
    return fields

  async def broken(fields):
    raise RuntimeError('secret detail')

  async def refused(fields):
    raise http_server.Refusal(404, 'no such\nthing')

  return http_server.application(
    post={'/echo': echo, '/broken': broken, '/refused': refused},
    limits=_LIMITS,
    close=lambda: None if closed is None else closed.append(True),
    token=token,
  )


@pytest.fixture(scope='module')
def url():
  with http_server.EmbeddedServer(_app) as server:
    yield server.url


def _detail(text):
  detail = json.loads(text)['detail']
  assert detail and '\n' not in detail and 'Traceback' not in text
  return detail


def test_handlers_answer_with_json(url):
  assert parse.urlsplit(url).hostname == '127.0.0.1'
  status, _, text = requests.send(url, '/echo', b'{"a": 1}')
  assert (status, text) == (200, '{"a": 1}')
  status, _, text = requests.send(url, '/health', method='GET')
  assert (status, json.loads(text)) == (200, {'status': 'ok'})


@pytest.mark.parametrize(
  ('path', 'body', 'method', 'status'),
  [
    ('/echo', b'', 'POST', 422),
    ('/echo', b'\xff', 'POST', 422),
    ('/echo', b'[' * 19, 'POST', 422),
    ('/echo', b'[]', 'POST', 422),
    ('/echo', b'x' * 30, 'POST', 413),
    ('/echo', b'', 'GET', 405),
    ('/other', b'', 'POST', 404),
    ('/refused', b'{}', 'POST', 404),
  ],
)
def test_every_refusal_is_one_line(url, path, body, method, status):
  got, _, text = requests.send(url, path, body, method=method)
  assert got == status and _detail(text)


def test_a_bug_is_500_without_a_traceback(url, caplog):
  status, _, text = requests.send(url, '/broken', b'{}')
  assert status == 500 and 'secret' not in _detail(text)
  assert 'secret detail' in caplog.text  # in the server's log


def test_too_many_are_429_and_health_still_answers():
  answering, ending = threading.Event(), threading.Event()

  async def wait(fields):
    answering.set()
    await asyncio.to_thread(ending.wait, 10)
    return fields

  def app():
    return http_server.application(
      post={'/wait': wait}, limits=_LIMITS, close=lambda: None
    )

  with (
    http_server.EmbeddedServer(app) as server,
    futures.ThreadPoolExecutor() as pool,
  ):
    first = pool.submit(requests.send, server.url, '/wait', b'{}')
    assert answering.wait(10)  # It is the only one that may be in flight.
    status, headers, text = requests.send(server.url, '/wait', b'{}')
    health = requests.send(server.url, '/health', method='GET')
    ending.set()
    assert first.result()[0] == 200
  assert status == 429 and headers['Retry-After'] == '7' and _detail(text)
  assert health[0] == 200


def test_all_but_health_needs_the_token():
  with http_server.EmbeddedServer(lambda: _app(token='s3cret')) as server:
    got = []
    for value in (None, 'Bearer no', 's3cret', 'B\xe9arer', 'Bearer s3cret'):
      headers = {} if value is None else {'Authorization': value}
      got.append(requests.send(server.url, '/echo', b'{}', headers=headers))
    health = requests.send(server.url, '/health', method='GET')
  assert [status for status, *_ in got] == [401, 401, 401, 401, 200]
  assert got[0][1]['WWW-Authenticate'] == 'Bearer'
  assert 's3cret' not in _detail(got[0][2])
  assert health[0] == 200


def _check_exposure(host, token):
  http_server.check_exposure(host, token, token_variable='SOME_TOKEN')


@pytest.mark.parametrize('host', ['127.0.0.1', '127.9.9.9', 'localhost', '::1'])
def test_loopback_needs_no_token(host):
  _check_exposure(host, '')


@pytest.mark.parametrize('host', ['0.0.0.0', '::', '', '10.0.0.1', 'a.example'])
def test_another_address_needs_a_token(host):
  with pytest.raises(ValueError, match='SOME_TOKEN'):
    _check_exposure(host, '')
  _check_exposure(host, 'token')


def test_an_error_of_the_application_is_raised_where_it_is_entered():
  def make_app():
    raise ValueError('no passages')

  before = set(threading.enumerate())
  with pytest.raises(ValueError, match='no passages'):
    http_server.EmbeddedServer(make_app).__enter__()
  assert set(threading.enumerate()) == before


def test_a_server_that_cannot_listen_is_cleaned_up():
  closed = []

  async def run():
    # An address that is reserved for documentation.
    async with http_server.serving(_app(closed=closed), '192.0.2.1', 0):
      pass

  with pytest.raises(OSError, match='192.0.2.1'):
    asyncio.run(run())
  assert closed == [True]


def test_nothing_is_left_behind():
  gc.collect()
  before = set(threading.enumerate())
  closed = []
  for _ in range(3):
    with http_server.EmbeddedServer(lambda: _app(closed=closed)) as server:
      assert requests.send(server.url, '/echo', b'{}')[0] == 200
    with pytest.raises(ConnectionRefusedError):
      requests.send(server.url, '/echo', b'{}')
  assert set(threading.enumerate()) == before and closed == [True] * 3
  gc.collect()  # An unclosed loop or socket would warn, and fail this test.
