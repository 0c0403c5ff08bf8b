"""The HTTP server: its refusals, their messages, its start and its end."""

import asyncio
from concurrent import futures
import functools
import gc
import json
import threading
from urllib import parse

import pytest

from stppo_jax.http import server as http_server
from tests.http import requests


async def _broken(fields):
  assert threading.current_thread() is not threading.main_thread()
  raise RuntimeError('secret detail')


async def _refused(fields):
  raise http_server.Refusal(404, 'no such\nthing')


@pytest.fixture(scope='module')
def url():
  post = {'/broken': _broken, '/refused': _refused}
  with requests.serve(post, max_body_bytes=20, body_timeout=0.2) as server:
    yield server.url


def _detail(text):
  detail = json.loads(text)['detail']
  assert detail and '\n' not in detail and 'Traceback' not in text
  return detail


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

  with (
    requests.serve({'/wait': wait}, max_concurrent=1, retry_after=7) as server,
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
  with requests.serve(token='s3cret') as server:
    got = []
    for value in (None, 'Bearer no', 's3cret', 'B\xe9arer', 'Bearer s3cret'):
      headers = {} if value is None else {'Authorization': value}
      got.append(requests.send(server.url, '/echo', b'{}', headers=headers))
    health = requests.send(server.url, '/health', method='GET')
  assert [status for status, *_ in got] == [401, 401, 401, 401, 200]
  assert got[0][1]['WWW-Authenticate'] == 'Bearer'
  assert 's3cret' not in _detail(got[0][2])
  assert health[0] == 200


@pytest.mark.parametrize('host', ['0.0.0.0', '::', '', '10.0.0.1', 'a.example'])
def test_another_address_needs_a_token(host):
  check = functools.partial(
    http_server.check_exposure, token_variable='SOME_TOKEN'
  )
  with pytest.raises(ValueError, match='SOME_TOKEN'):
    check(host, '')
  check(host, 'token')
  for loopback in ('127.0.0.1', '127.9.9.9', 'localhost', '::1'):
    check(loopback, '')


def test_an_error_of_the_application_is_raised_where_it_is_entered():
  def make_app():
    raise ValueError('no passages')

  before = set(threading.enumerate())
  with pytest.raises(ValueError, match='no passages'):
    http_server.EmbeddedServer(make_app).__enter__()
  assert set(threading.enumerate()) == before


def test_a_server_that_cannot_listen_is_cleaned_up():
  closed = []
  app = requests.application(closed=closed)

  async def run():
    # An address that is reserved for documentation.
    async with http_server.serving(app, '192.0.2.1', 0):
      pass

  with pytest.raises(OSError, match='192.0.2.1'):
    asyncio.run(run())
  assert closed == [True]


def test_nothing_is_left_behind():
  gc.collect()
  before = set(threading.enumerate())
  closed = []
  for _ in range(3):
    with requests.serve(closed=closed) as server:
      assert parse.urlsplit(server.url).hostname == '127.0.0.1'
      assert requests.send(server.url, '/echo', b'{}')[::2] == (200, '{}')
    with pytest.raises(ConnectionRefusedError):
      requests.send(server.url, '/echo', b'{}')
  assert set(threading.enumerate()) == before and closed == [True] * 3
  gc.collect()  # An unclosed loop or socket would warn, and fail this test.
