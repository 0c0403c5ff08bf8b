"""The server over loopback: dialect A to the letter, and every refusal."""

import asyncio
import gc
import http.client
import json
import threading
from urllib import parse

import pytest

from stppo_jax import types
from stppo_jax.http import server as http_server
from stppo_jax.retrieval import server

_PASSAGES = [
  types.Passage('p0', 'Paris', 'Paris is the capital of France.'),
  types.Passage('p1', 'Rome', 'Rome is the capital of Italy.'),
]
_LIMITS = server.Limits(
  max_body_bytes=2000,
  max_queries=3,
  max_query_chars=100,
  max_topk=5,
  max_concurrent=1,
  retry_after=7,
  body_timeout=0.2,
  max_worlds=2,
)


def _world(world):
  if world == 404:
    raise KeyError(world)
  return [types.Passage(f'w{world}', 'Town', f'The mayor is number{world}.')]


@pytest.fixture(scope='module')
def url():
  embedded = server.embedded(_PASSAGES, world_passages=_world, limits=_LIMITS)
  with embedded:
    yield embedded.url


def _request(url, path='/retrieve', body=b'', *, method='POST', headers=None):
  """(status, headers, text) of one request."""
  host = parse.urlsplit(url).netloc
  connection = http.client.HTTPConnection(host, timeout=5)
  try:
    if not isinstance(body, bytes):
      body = json.dumps(body).encode()
    connection.request(method, path, body, headers or {})
    response = connection.getresponse()
    return response.status, response.headers, response.read().decode()
  finally:
    connection.close()


def test_dialect_a_with_scores(url):
  body = {'queries': ['Italy', 'France'], 'topk': 1, 'return_scores': True}
  status, _, text = _request(url, body=body)
  assert status == 200
  [[rome], [paris]] = json.loads(text)['result']
  assert rome.keys() == {'document', 'score'} and rome['score'] > 0
  assert rome['document'] == {
    'id': 'p1',
    'contents': '"Rome"\nRome is the capital of Italy.',
  }
  assert paris['document']['id'] == 'p0'


def test_dialect_a_without_scores(url):
  body = {'queries': ['Rome', 'xyzzy'], 'topk': 2, 'return_scores': False}
  status, _, text = _request(url, body=body)
  assert status == 200
  assert json.loads(text)['result'] == [
    [{'id': 'p1', 'contents': '"Rome"\nRome is the capital of Italy.'}],
    [],
  ]


def test_no_queries_no_lists(url):
  assert _request(url, body={'queries': []})[::2] == (200, '{"result": []}')


def test_health(url):
  status, _, text = _request(url, '/health', method='GET')
  assert (status, json.loads(text)) == (200, {'status': 'ok'})


def test_worlds_have_passages_of_their_own(url):
  for world in (3, 17, 99, 3):
    body = {'queries': [f'number{world}', 'Paris'], 'topk': 2}
    status, _, text = _request(url, f'/worlds/{world}/retrieve', body)
    assert status == 200
    [[document], []] = json.loads(text)['result']
    assert document['id'] == f'w{world}'


def test_indexes_of_worlds_are_kept_and_bounded():
  built = []

  def world_passages(world):
    built.append(world)
    return _world(world)

  embedded = server.embedded(world_passages=world_passages, limits=_LIMITS)
  with embedded:
    for world in (1, 2, 1, 3, 1, 2):
      body = {'queries': ['mayor']}
      assert _request(embedded.url, f'/worlds/{world}/retrieve', body)[0] == 200
  # Two fit: 3 pushes out 2, which was not used for longest, and not 1.
  assert built == [1, 2, 3, 2]


@pytest.mark.parametrize(
  ('path', 'status'),
  [
    ('/worlds/404/retrieve', 404),
    ('/worlds/-1/retrieve', 404),
    (f'/worlds/{"9" * 400}/retrieve', 404),
    ('/elsewhere/retrieve', 404),
    ('/worlds/1/../2/retrieve', 404),
    ('/other', 404),
  ],
)
def test_unknown_corpus(url, path, status):
  got, _, text = _request(url, path, {'queries': ['x']})
  assert got == status
  _is_one_line(text)


@pytest.mark.parametrize(
  ('body', 'line'),
  [
    (b'', 'body: expected JSON'),
    (b'\xff', 'body: expected JSON'),
    (b'[' * 1500, 'body: expected JSON'),
    (b'[]', 'body: expected a JSON object'),
    ({}, 'queries: missing'),
    ({'queries': 'x'}, 'queries: expected a list of strings'),
    ({'queries': ['x', 3]}, 'queries: expected a list of strings'),
    ({'queries': ['x'] * 4}, 'queries: 4, at most 3'),
    ({'queries': ['x' * 101]}, 'at most 100 characters'),
    ({'queries': ['x'], 'topk': 0}, 'topk: expected an integer'),
    ({'queries': ['x'], 'topk': 6}, 'topk: expected an integer'),
    ({'queries': ['x'], 'topk': True}, 'topk: expected an integer'),
    ({'queries': ['x'], 'topk': 1.0}, 'topk: expected an integer'),
    ({'queries': ['x'], 'return_scores': 1}, 'return_scores: expected'),
    ({'queries': ['x'], 'top_k': 1}, "unknown field 'top_k'"),
  ],
)
def test_a_bad_body_is_422_with_one_line(url, body, line):
  status, _, text = _request(url, body=body)
  assert status == 422
  assert line in _is_one_line(text)


def test_a_large_body_is_413(url):
  status, _, text = _request(url, body=b'x' * 3000)
  assert status == 413
  _is_one_line(text)


def test_other_methods_are_405(url):
  status, _, text = _request(url, method='GET')
  assert status == 405
  _is_one_line(text)


def test_too_many_and_too_slow(url):
  host, port = parse.urlsplit(url).netloc.split(':')

  async def slow_client():
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b'POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n')
    writer.write(b'\r\n{')
    await writer.drain()
    await asyncio.sleep(0.05)  # It now holds the only place there is.
    busy = await asyncio.to_thread(_request, url, body={'queries': ['x']})
    status_line = await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    await writer.wait_closed()
    return busy, status_line

  (status, headers, text), status_line = asyncio.run(slow_client())
  assert status == 429 and headers['Retry-After'] == '7'
  _is_one_line(text)
  assert b' 408 ' in status_line
  assert _request(url, body={'queries': ['x']})[0] == 200


def test_a_bug_is_500_without_a_traceback(caplog):
  def broken(world):
    raise RuntimeError('secret detail')

  with server.embedded(world_passages=broken) as embedded:
    status, _, text = _request(
      embedded.url, '/worlds/1/retrieve', {'queries': ['x']}
    )
  assert (status, json.loads(text)) == (500, {'detail': 'internal error'})
  assert 'secret detail' in caplog.text  # in our log, where it belongs


def test_without_a_corpus_of_its_own_only_worlds_are_served():
  with server.embedded(world_passages=_world) as embedded:
    assert _request(embedded.url, body={'queries': ['x']})[0] == 404
  with server.embedded(_PASSAGES) as embedded:
    body = {'queries': ['x']}
    assert _request(embedded.url, '/worlds/1/retrieve', body)[0] == 404


def test_the_token_is_asked_for():
  async def statuses():
    app = server.make_app(_PASSAGES, token='s3cret')
    runner, url = await http_server.start(app, '127.0.0.1', 0)
    try:
      got = []
      for value in (
        None,
        'Bearer wrong',
        's3cret',
        'B\xe9arer',
        'Bearer s3cret',
      ):
        headers = {} if value is None else {'Authorization': value}
        reply = await asyncio.to_thread(
          _request, url, body={'queries': ['x']}, headers=headers
        )
        got.append(reply[0])
      health = await asyncio.to_thread(_request, url, '/health', method='GET')
      return got, health[0]
    finally:
      await runner.cleanup()

  assert asyncio.run(statuses()) == ([401, 401, 401, 401, 200], 200)


@pytest.mark.parametrize('host', ['127.0.0.1', '127.9.9.9', 'localhost', '::1'])
def test_loopback_needs_no_token(host):
  server.check_exposure(host, '')


@pytest.mark.parametrize('host', ['0.0.0.0', '::', '', '10.0.0.1', 'a.example'])
def test_another_address_needs_a_token(host):
  with pytest.raises(ValueError, match='STPPO_RETRIEVAL_TOKEN'):
    server.check_exposure(host, '')
  server.check_exposure(host, 'token')


def test_nothing_is_left_behind():
  gc.collect()
  before = set(threading.enumerate())
  for _ in range(3):
    with server.embedded(_PASSAGES) as embedded:
      assert _request(embedded.url, body={'queries': ['x']})[0] == 200
  assert set(threading.enumerate()) == before
  gc.collect()  # An unclosed loop or socket would warn, and fail this test.


def _is_one_line(text):
  detail = json.loads(text)['detail']
  assert detail and '\n' not in text and 'Traceback' not in text
  return detail
