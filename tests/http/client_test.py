"""The HTTP client against a server that fails in many ways."""

import asyncio
import contextlib
import datetime
from email import utils as email_utils
import functools
import gc
import gzip
import time

from aiohttp import web
import pytest

from stppo_jax.http import client as http_client
from stppo_jax.http import server as http_server

_TOKEN_VARIABLE = 'STPPO_TEST_TOKEN'
_Cause = http_client.Cause


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
  pauses = http_client.Pauses(first=0.004, health=0.01)
  monkeypatch.setattr(http_client, 'PAUSES', pauses)


def _client(url, *, timeout=5.0, **options):
  return http_client.Client(
    url, timeout=timeout, token_variable=_TOKEN_VARIABLE, **options
  )


@contextlib.asynccontextmanager
async def _serving(respond):
  """Runs a server in the test's loop; yields its URL and its requests."""
  requests = []

  async def handle(request):
    requests.append(request)
    response = respond(request)
    return await response if asyncio.iscoroutine(response) else response

  app = web.Application()
  app.router.add_route('*', '/{path:.*}', handle)
  async with http_server.serving(app, '127.0.0.1', 0) as url:
    yield url, requests


def _post(respond, **options):
  """Returns the reply to one post, or its failure, and the requests."""

  async def run():
    async with _serving(respond) as (url, requests):
      client = _client(url, **options)
      try:
        return await client.post('/path', {'a': 1}), requests
      except http_client.Failure as failure:
        return failure, requests
      finally:
        await client.close()

  return asyncio.run(run())


def test_a_failed_status_has_an_excerpt_on_one_line():
  text = 'out\nof \x1b memory ' + 'x' * 1000
  failure, _ = _post(lambda _: web.Response(status=500, text=text))
  assert failure.cause is _Cause.STATUS and failure.status == 500
  assert str(failure).startswith('status 500: out of memory xxx')
  assert len(str(failure)) < 250 and failure.retry_after == 0


@pytest.mark.parametrize('status', [301, 302, 307])
def test_redirects_are_not_followed(status):
  redirect = web.Response(status=status, headers={'Location': '/elsewhere'})
  failure, requests = _post(lambda _: redirect)
  assert failure.status == status
  assert [request.path for request in requests] == ['/path']


def test_a_reply_that_is_too_large_is_cut_off(monkeypatch):
  monkeypatch.setattr(http_client, 'MAX_REPLY_BYTES', 1000)
  failure, _ = _post(lambda _: web.Response(text=' ' * 100_000))
  assert failure.cause is _Cause.TOO_LARGE and '1000 bytes' in str(failure)


def test_a_reply_is_never_decompressed():
  bomb = gzip.compress(b' ' * 1_000_000)
  headers = {'Content-Encoding': 'gzip'}
  reply, (request,) = _post(lambda _: web.Response(body=bomb, headers=headers))
  assert reply == bomb and request.headers['Accept-Encoding'] == 'identity'


def test_a_reply_that_is_cut_off_is_a_failed_connection():
  def half(request):
    request.transport.write(b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{')
    request.transport.close()
    return web.Response()

  failure, _ = _post(half)
  assert failure.cause is _Cause.CONNECTION and '\n' not in str(failure)


def test_posts_wait_for_a_slot_before_their_timeout_starts():
  most = in_flight = 0

  async def respond(_):
    nonlocal most, in_flight
    in_flight += 1
    most = max(most, in_flight)
    await asyncio.sleep(0.1)
    in_flight -= 1
    return web.json_response({})

  async def run():
    async with _serving(respond) as (url, _):
      client = _client(url, timeout=0.5, max_concurrent=2)
      await asyncio.gather(*(client.post('/', {}) for _ in range(12)))
      await client.close()

  asyncio.run(run())
  assert most == 2


def test_no_proxy_of_the_environment_is_used(monkeypatch):
  monkeypatch.setenv('http_proxy', 'http://127.0.0.1:9')
  monkeypatch.setenv('no_proxy', '')

  async def echo(request):
    return web.json_response(await request.json())

  reply, (request,) = _post(echo)
  assert reply == b'{"a": 1}' and request.path == '/path'


def test_the_token_is_sent_and_kept_out_of_errors(monkeypatch):
  monkeypatch.setenv(_TOKEN_VARIABLE, 's3cret')

  def echo(request):
    return web.Response(status=401, text=request.headers['Authorization'])

  failure, _ = _post(echo)
  assert str(failure) == 'status 401: Bearer ***'
  monkeypatch.delenv(_TOKEN_VARIABLE)
  _, (request,) = _post(lambda _: web.Response())
  assert 'Authorization' not in request.headers


def test_retry_after_is_seconds_or_a_date_or_nothing():
  read = http_client.retry_after_seconds
  assert (read('3'), read('0.5')) == (3.0, 0.5)
  for value in (
    *(None, '-4', 'nan', 'inf', '9' * 5000, 'soon', ''),
    'Wed, 21 Oct 2015 07:28:00 GMT',
    'Fri, 31 Dec 99999 23:59:59 GMT',
    'Fri, 31 Dec 99999999999999999999 23:59:59 GMT',
    'Fri, 31 Dec 2030 23:59:59 +999999999999',
    'Fri, 32 Foo 2030 77:59:59 GMT',
  ):
    assert read(value) == 0.0, value
  then = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=90)
  for value in (
    email_utils.format_datetime(then, usegmt=True),
    email_utils.format_datetime(then).replace('+0000', '-0000'),
  ):
    assert 85 < read(value) <= 90
  assert read('Fri, 31 Dec 9999 23:59:59 -2359') > 1e9


@pytest.mark.parametrize(
  ('attempt', 'retry_after', 'least', 'most'),
  [
    # Pauses double up to a bound, with a factor from 0.5 to 1.5.
    *[(0, 0.0, 0.01, 0.03), (1, 0.0, 0.02, 0.06)],
    *[(2, 0.0, 0.03, 0.09), (10**6, 0.0, 0.03, 0.09)],
    # Retry-After is honoured up to a bound.
    *[(0, 0.12, 0.12, 0.12), (0, 1e11, 0.15, 0.15)],
  ],
)
def test_pauses_before_another_attempt(
  monkeypatch, attempt, retry_after, least, most
):
  pauses = http_client.Pauses(
    first=0.02, longest=0.06, longest_retry_after=0.15
  )
  monkeypatch.setattr(http_client, 'PAUSES', pauses)
  failure = http_client.Failure('x', _Cause.STATUS, retry_after=retry_after)

  start = time.monotonic()
  asyncio.run(_client('http://x').back_off(attempt, failure))
  assert least <= time.monotonic() - start < most + 0.5


def test_waiting_ends_when_the_server_is_ready_or_after_the_grace_seconds():
  statuses = iter([503, 500, 200])

  async def run():
    respond = lambda _: web.Response(status=next(statuses, 404))
    async with _serving(respond) as (url, requests):
      client = _client(url)
      wait = functools.partial(client.wait_until_ready, '/health')
      await wait(grace=5.0)
      assert [request.path for request in requests] == ['/health'] * 3
      with pytest.raises(http_client.NotReady, match='status 404'):
        await wait(grace=0.1)
      await wait(grace=0.1, ready_statuses=(200, 404))
    with pytest.raises(http_client.NotReady, match='Cannot connect'):
      await wait(grace=0.1)
    await client.close()

  asyncio.run(run())


def test_connections_close_with_their_loop():
  async def run():
    async with _serving(lambda _: web.Response(text='fine')) as (url, _):
      assert await _client(url).get('/health') == b'fine'

  # An open connection would warn when it is collected, and fail this test.
  asyncio.run(run())
  gc.collect()
