"""The client against a server that fails in every way there is."""

import asyncio
import contextlib
import gzip
import json
import time

from aiohttp import web
import pytest

from stppo_jax import types
from stppo_jax.http import server as http_server
from stppo_jax.retrieval import client
from stppo_jax.retrieval import protocol
from stppo_jax.retrieval import server
from stppo_jax.retrieval import transport


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
  monkeypatch.setattr(client, '_BACKOFF', 0.004)
  monkeypatch.setattr(client, '_HEALTH_PERIOD', 0.02)


def _retriever(url, **changes):
  options = dict(
    topk=2,
    timeout=5.0,
    retries=3,
    start_grace=0.2,
    max_queries_per_request=64,
  )
  return client.HttpRetriever(url, **(options | changes))


def _list(query):
  """What the fake server answers to one query."""
  document = {'id': f'id {query}', 'contents': f'"About {query}"\nbody'}
  return [{'document': document, 'score': 0.5}]


def _passage(query):
  return types.Passage(f'id {query}', f'About {query}', 'body', 0.5)


def _good(body):
  return web.json_response({'result': [_list(q) for q in body['queries']]})


class _Server:
  """Runs in the test's loop; keeps what it was asked, as (path, body)."""

  def __init__(self, respond=_good):
    self._respond = respond
    self.requests = []

  async def _handle(self, request):
    body = await request.json()
    self.requests.append((request.path, body))
    response = self._respond(body)
    return await response if asyncio.iscoroutine(response) else response

  @contextlib.asynccontextmanager
  async def running(self):
    app = web.Application()
    app.router.add_post('/{path:.*}', self._handle)
    runner, url = await http_server.start(app, '127.0.0.1', 0)
    try:
      yield url
    finally:
      await runner.cleanup()

  @property
  def queries(self):
    return [body['queries'] for _, body in self.requests]


def _ask(fake, queries, **options):
  """Results (passages or the exception) of concurrent calls; statistics."""

  async def run():
    async with fake.running() as url:
      retriever = _retriever(url, **options)
      results = await asyncio.gather(
        *(retriever.retrieve(query) for query in queries),
        return_exceptions=True,
      )
      await retriever.close()
      return results, retriever.statistics()

  return asyncio.run(run())


def _once(failure):
  """A server that fails its first request in the given way."""
  failed = []

  def respond(body):
    if failed:
      return _good(body)
    failed.append(body)
    return failure(body)

  return respond


def test_one_query_in_dialect_a():
  fake = _Server()
  results, _ = _ask(fake, ['cats'])
  assert results == [[_passage('cats')]]
  assert fake.requests == [
    ('/retrieve', {'queries': ['cats'], 'topk': 2, 'return_scores': True})
  ]


def test_a_burst_travels_together_in_bounded_requests():
  fake = _Server()
  queries = [f'q{i}' for i in range(10)]
  results, statistics = _ask(fake, queries, max_queries_per_request=4)
  assert results == [[_passage(q)] for q in queries]
  assert sorted(map(len, fake.queries)) == [2, 4, 4]
  assert statistics['retrieval/ok'] == 10.0
  assert statistics['retrieval/failures'] == 0.0
  assert 0 < statistics['retrieval/latency_p50'] < 5
  assert (
    statistics['retrieval/latency_p50'] <= statistics['retrieval/latency_p99']
  )


def test_each_corpus_has_its_own_path():
  fake = _Server()

  async def run():
    async with fake.running() as url:
      # As users of Search-R1 write the address.
      retriever = _retriever(f'{url}/retrieve')
      await asyncio.gather(
        retriever.retrieve('a', corpus='worlds/1'),
        retriever.retrieve('a', corpus='worlds/2'),
        retriever.retrieve('b', corpus='worlds/1'),
        retriever.retrieve('a'),
      )
      for corpus in ('../x', 'a/../b', '/a', 'a//b', 'a?b', 'a%2e', 'a/'):
        with pytest.raises(ValueError, match='no plain relative path'):
          await retriever.retrieve('a', corpus=corpus)

  asyncio.run(run())
  asked = {path: body['queries'] for path, body in fake.requests}
  assert asked == {
    '/worlds/1/retrieve': ['a', 'b'],
    '/worlds/2/retrieve': ['a'],
    '/retrieve': ['a'],
  }


@pytest.mark.parametrize(
  'failure',
  [
    lambda body: web.Response(status=500, text='Traceback ...'),
    lambda body: web.Response(status=503),
    lambda body: web.Response(status=429),
    lambda body: web.Response(status=422),
    lambda body: web.Response(text='<html>'),
    lambda body: web.Response(body=b'\xff\xfe'),
    lambda body: web.Response(text='[' * 100000),
    lambda body: web.json_response([]),
    lambda body: web.json_response({'results': []}),
    lambda body: web.json_response({'result': {}}),
    lambda body: web.json_response({'result': []}),
    lambda body: web.json_response({'result': [_list('x')] * 3}),
    lambda body: web.Response(
      body=gzip.compress(b'{"result": []}'),
      headers={'Content-Encoding': 'gzip'},
    ),
    lambda body: web.Response(
      body=b'{"result"', headers={'Content-Length': '500'}
    ),
  ],
)
def test_one_failed_request_is_asked_again(failure):
  fake = _Server(_once(failure))
  results, statistics = _ask(fake, ['a', 'b'], timeout=0.5)
  assert results == [[_passage('a')], [_passage('b')]]
  assert statistics['retrieval/ok'] == 2.0
  assert statistics['retrieval/retries'] == 2.0
  assert statistics['retrieval/failures'] == 0.0


@pytest.mark.parametrize(
  'entry',
  [
    None,
    {},
    ['text'],
    [{'document': {}}],
    [{'document': {'contents': 3}}],
    [{'document': {'contents': 'a'}, 'score': None}],
    [{'document': {'contents': 'a'}, 'score': True}],
    [{'document': {'contents': 'a'}, 'score': float('nan')}],
  ],
)
def test_only_the_malformed_list_is_asked_again(entry):
  def respond(body):
    lists = [_list(query) for query in body['queries']]
    return web.json_response({'result': [lists[0], entry] + lists[2:]})

  fake = _Server(_once(respond))
  results, statistics = _ask(fake, ['a', 'b', 'c'])
  assert results == [[_passage('a')], [_passage('b')], [_passage('c')]]
  assert fake.queries == [['a', 'b', 'c'], ['b']]
  assert statistics['retrieval/retries'] == 1.0


def test_bare_documents_and_more_than_asked_for():
  def respond(body):
    document = {'id': '1', 'contents': '"T"\nx'}
    wrapped = {'document': {'pid': '2', 'title': 'U', 'text': 'y'}}
    return web.json_response(
      {'result': [[document, wrapped, document] for _ in body['queries']]}
    )

  results, _ = _ask(_Server(respond), ['a'])
  assert results == [
    [types.Passage('1', 'T', 'x'), types.Passage('2', 'U', 'y')]
  ]


def test_a_query_that_breaks_the_server_fails_alone():
  def respond(body):
    if 'poison' in body['queries']:
      return web.Response(status=500)
    return _good(body)

  queries = [f'q{i}' for i in range(20)] + ['poison']
  for retries in (1, 3):
    results, statistics = _ask(_Server(respond), queries, retries=retries)
    *healthy, failed = results
    assert healthy == [[_passage(f'q{i}')] for i in range(20)]
    assert isinstance(failed, protocol.RetrievalError)
    assert 'status 500' in str(failed) and '\n' not in str(failed)
    assert statistics['retrieval/ok'] == 20.0
    assert statistics['retrieval/failures'] == 1.0


def test_an_overloaded_server_is_not_asked_in_more_parts():
  fake = _Server(lambda body: web.Response(status=503))
  results, statistics = _ask(fake, ['a', 'b', 'c'], retries=2)
  assert all(isinstance(r, protocol.RetrievalError) for r in results)
  assert fake.queries == [['a', 'b', 'c']] * 3
  assert statistics['retrieval/retries'] == 6.0
  assert statistics['retrieval/failures'] == 3.0
  assert statistics['retrieval/latency_p99'] == 0.0


def test_retry_after_is_honoured():
  times = []

  def respond(body):
    times.append(time.monotonic())
    if len(times) == 1:
      return web.Response(status=429, headers={'Retry-After': '0.3'})
    return _good(body)

  results, _ = _ask(_Server(respond), ['a'])
  assert results == [[_passage('a')]]
  assert 0.3 <= times[1] - times[0] < 1.0


@pytest.mark.parametrize('status', [301, 302, 307, 401, 403, 404])
def test_what_waiting_cannot_change_is_asked_once(status):
  fake = _Server(
    lambda body: web.Response(
      status=status, headers={'Location': '/elsewhere', 'Retry-After': '9'}
    )
  )
  [error], _ = _ask(fake, ['a'])
  assert isinstance(error, protocol.RetrievalError)
  assert f'status {status}' in str(error)
  assert [path for path, _ in fake.requests] == ['/retrieve']  # no redirect


def test_a_slow_answer_times_out_and_others_go_on():
  async def respond(body):
    if 'slow' in body['queries']:
      await asyncio.sleep(5)
    return _good(body)

  fake = _Server(respond)
  start = time.monotonic()
  results, _ = _ask(fake, ['a', 'slow', 'b'], timeout=0.1, retries=1)
  assert time.monotonic() - start < 2.0
  assert results[0] == [_passage('a')] and results[2] == [_passage('b')]
  assert isinstance(results[1], protocol.RetrievalError)
  assert 'Timeout' in str(results[1])


def test_an_enormous_reply_is_cut_off(monkeypatch):
  monkeypatch.setattr(transport, '_MAX_REPLY_BYTES', 1000)
  padded = lambda body: web.Response(text=' ' * 100_000)
  [error], _ = _ask(_Server(padded), ['a'], retries=0)
  assert isinstance(error, protocol.RetrievalError)
  assert 'exceeds 1000 bytes' in str(error)


def test_connection_refused():
  async def run():
    async with _Server().running() as url:
      pass  # The port was free a moment ago, and is again.
    retriever = _retriever(url, retries=2)
    with pytest.raises(protocol.RetrievalError, match=r'\(attempt 3\)'):
      await retriever.retrieve('a')
    with pytest.raises(protocol.RetrieverUnreachable, match='within 0.2 s'):
      await retriever.wait_until_ready()
    await retriever.close()

  asyncio.run(run())


def test_thirty_percent_faults_lose_nothing():
  # Every third request fails, in turns: four attempts always reach one.
  count = 0

  def respond(body):
    nonlocal count
    count += 1
    return web.Response(status=503) if count % 3 == 0 else _good(body)

  queries = [f'q{i}' for i in range(300)]
  results, statistics = _ask(
    _Server(respond), queries, max_queries_per_request=10, retries=6
  )
  assert results == [[_passage(q)] for q in queries]
  assert statistics['retrieval/retries'] > 0


def test_the_cache_is_per_corpus_and_bounded(monkeypatch):
  monkeypatch.setattr(client, '_CACHED_QUERIES', 2)
  fake = _Server()

  async def run():
    async with fake.running() as url:
      retriever = _retriever(url)
      first = await asyncio.gather(*[retriever.retrieve('a')] * 1)
      first[0].clear()  # The caller's own list, not the cache's.
      assert await retriever.retrieve('a') == [_passage('a')]
      assert (retriever.cache_hits, retriever.cache_misses) == (1, 1)
      await retriever.retrieve('a', corpus='c')
      await retriever.retrieve('a')
      await retriever.retrieve('b')  # pushes ('c', 'a') out
      await retriever.retrieve('a')
      await retriever.retrieve('a', corpus='c')
      assert (retriever.cache_hits, retriever.cache_misses) == (3, 4)
      assert retriever.statistics()['retrieval/ok'] == 4.0
      assert retriever.statistics()['retrieval/ok'] == 0.0

  asyncio.run(run())
  assert len(fake.requests) == 4


def test_equal_queries_at_one_time_are_sent_once_and_failures_not_kept():
  fake = _Server(_once(lambda body: web.Response(status=503)))

  async def run():
    async with fake.running() as url:
      retriever = _retriever(url, retries=0)
      for result in (protocol.RetrievalError, list):
        answers = await asyncio.gather(
          *(retriever.retrieve('a') for _ in range(3)),
          return_exceptions=True,
        )
        assert [type(answer) for answer in answers] == [result] * 3

  asyncio.run(run())
  assert fake.queries == [['a'], ['a']]


def test_one_retriever_in_one_loop_after_another():
  with server.embedded([types.Passage('1', 'T', 'cat dog')]) as embedded:
    retriever = _retriever(embedded.url)
    for query in ('cat', 'dog'):

      async def run(query=query):
        await retriever.wait_until_ready()
        return await retriever.retrieve(query)

      # Never closed: the end of the loop does it, or this test warns.
      [passage] = asyncio.run(run())
      assert passage.id == '1' and passage.score > 0


def test_who_gives_up_does_not_take_the_answer_from_others():
  async def respond(body):
    await asyncio.sleep(0.1)
    return _good(body)

  async def run():
    async with _Server(respond).running() as url:
      retriever = _retriever(url)
      one = asyncio.create_task(retriever.retrieve('a'))
      two = asyncio.create_task(retriever.retrieve('a'))
      await asyncio.sleep(0.02)
      one.cancel()
      assert await two == [_passage('a')]
      with pytest.raises(asyncio.CancelledError):
        await one

  asyncio.run(run())


def test_closing_fails_those_who_wait():
  async def respond(body):
    await asyncio.sleep(5)
    return _good(body)

  async def run():
    async with _Server(respond).running() as url:
      retriever = _retriever(url)
      waiting = asyncio.create_task(retriever.retrieve('a'))
      await asyncio.sleep(0.05)
      await retriever.close()
      with pytest.raises(protocol.RetrievalError, match='closed'):
        await waiting

  asyncio.run(run())


def test_waits_for_a_server_that_comes_up_late():
  async def run():
    health = iter([503, 500, 200])
    app = web.Application()
    seen = []

    async def handle(request):
      seen.append(request.path)
      return web.Response(status=next(health))

    app.router.add_get('/health', handle)
    runner, url = await http_server.start(app, '127.0.0.1', 0)
    retriever = _retriever(url, start_grace=5.0)
    await retriever.wait_until_ready()
    await retriever.close()
    await runner.cleanup()
    assert seen == ['/health'] * 3

  asyncio.run(run())


def test_a_foreign_server_without_health_is_ready():
  async def run():
    async with _Server().running() as url:
      retriever = _retriever(url)
      await retriever.wait_until_ready()  # 405
      await retriever.close()

  asyncio.run(run())


def test_the_token_is_sent_and_kept_out_of_errors(monkeypatch):
  monkeypatch.setenv(server.TOKEN_VARIABLE, 's3cret')

  async def run(token):
    app = server.make_app([types.Passage('1', 'T', 'cat')], token=token)
    runner, url = await http_server.start(app, '127.0.0.1', 0)
    retriever = _retriever(url)
    try:
      return await retriever.retrieve('cat')
    finally:
      await retriever.close()
      await runner.cleanup()

  assert asyncio.run(run('s3cret'))[0].id == '1'
  with pytest.raises(protocol.RetrievalError, match='status 401') as error:
    asyncio.run(run('other'))
  assert 's3cret' not in str(error.value)


def test_no_proxy_from_the_environment(monkeypatch):
  monkeypatch.setenv('http_proxy', 'http://127.0.0.1:9')
  monkeypatch.setenv('no_proxy', '')
  assert _ask(_Server(), ['a'])[0] == [[_passage('a')]]


@pytest.mark.parametrize(
  'url',
  [
    'http://127.0.0.1:8000',
    'https://search.example/v1/',
    'http://[::1]:80/retrieve',
  ],
)
def test_good_urls(url):
  assert client.check_url(url) is None


@pytest.mark.parametrize(
  'url',
  [
    '',
    'localhost:8000',
    'ftp://host/',
    'file:///etc/passwd',
    'http://',
    'http://:80',
    'http://host:port',
    'http://host:99999',
    'http://host:0',
    'http://user:secret@host',
    'http://host/?q=1',
    'http://host/#a',
    'http://host/a b',
    'http://host\n',
    'http://[::1',
  ],
)
def test_bad_urls_are_refused_in_one_line(url):
  problem = client.check_url(url)
  assert problem and '\n' not in problem and 'secret' not in problem
  with pytest.raises(ValueError) as error:
    _retriever(url)
  assert str(error.value) == problem


def test_latencies_include_the_retries():
  fake = _Server(
    _once(lambda body: web.Response(status=429, headers={'Retry-After': '0.2'}))
  )
  _, statistics = _ask(fake, ['a'])
  assert 0.2 <= statistics['retrieval/latency_p50'] < 1.0


def test_what_is_sent_is_json_whatever_the_policy_wrote():
  fake = _Server()
  query = 'naïve "quotes" \x00 \ud800 </search>\n'
  results, _ = _ask(fake, [query])
  assert results[0][0].id == f'id {query}'
  assert json.loads(json.dumps(fake.queries)) == [[query]]
