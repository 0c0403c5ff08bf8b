"""The retriever over HTTP: bursts, corpora, cache, loops, statistics."""

import asyncio

from aiohttp import web
import pytest

from stppo_jax import types
from stppo_jax.retrieval import address
from stppo_jax.retrieval import protocol
from stppo_jax.retrieval import server
from tests.retrieval import fake_servers


def test_a_burst_shares_requests_of_bounded_size():
  fake = fake_servers.Server()
  queries = [f'q{i}' for i in range(10)]
  results, statistics = fake_servers.retrieve(
    fake, queries, max_queries_per_request=4
  )
  assert results == fake_servers.found(queries)
  assert sorted(map(len, fake.queries)) == [2, 4, 4]
  assert statistics['retrieval/ok'] == 10.0
  assert statistics['retrieval/failures'] == 0.0
  assert statistics['retrieval/outages'] == 0.0
  p50, p99 = (statistics[f'retrieval/latency_p{n}'] for n in (50, 99))
  assert 0 < p50 <= p99 < 5


def test_each_corpus_has_its_own_path():
  fake = fake_servers.Server()

  async def search(retriever):
    await asyncio.gather(
      retriever.retrieve('a', corpus='worlds/1'),
      retriever.retrieve('a', corpus='worlds/2'),
      retriever.retrieve('b', corpus='worlds/1'),
      retriever.retrieve('a'),
    )
    for corpus in ('../x', 'a/../b', '/a', 'a//b', 'a?b', 'a%2e', 'a/'):
      with pytest.raises(ValueError):
        await retriever.retrieve('a', corpus=corpus)

  # The form of the address in Search-R1.
  fake_servers.use(fake, search, path='/retrieve')
  asked = {path: body['queries'] for path, body in fake.requests}
  assert asked == {
    '/worlds/1/retrieve': ['a', 'b'],
    '/worlds/2/retrieve': ['a'],
    '/retrieve': ['a'],
  }


def test_the_cache_is_per_corpus():
  fake = fake_servers.Server()

  async def search(retriever):
    first = await retriever.retrieve('a')
    first.clear()  # The caller's own list, not the cache's.
    assert await retriever.retrieve('a') == [fake_servers.passage('a')]
    assert len(fake.requests) == 1
    await retriever.retrieve('a', corpus='c')
    await retriever.retrieve('a')
    assert len(fake.requests) == 2
    statistics = retriever.statistics()
    assert statistics['retrieval/ok'] == 2.0
    assert statistics['retrieval/answers'] == 4.0
    assert statistics['retrieval/empty'] == 0.0
    assert retriever.statistics()['retrieval/ok'] == 0.0

  fake_servers.use(fake, search)


def test_equal_queries_at_one_time_are_sent_once_and_failures_not_kept():
  unavailable = lambda body: web.Response(status=503)
  fake = fake_servers.Server(fake_servers.fail_once(unavailable))

  async def search(retriever):
    for result in (protocol.RetrievalError, list):
      answers = await asyncio.gather(
        *(retriever.retrieve('a') for _ in range(3)), return_exceptions=True
      )
      assert [type(answer) for answer in answers] == [result] * 3

  fake_servers.use(fake, search, retries=0)
  assert fake.queries == [['a'], ['a']]


async def _slowly(body):
  await asyncio.sleep(0.3)
  return fake_servers.answer(body)


def test_a_cancelled_caller_does_not_cancel_the_others():
  async def search(retriever):
    one, two = (asyncio.create_task(retriever.retrieve('a')) for _ in range(2))
    await asyncio.sleep(0.02)
    one.cancel()
    assert await two == [fake_servers.passage('a')]
    with pytest.raises(asyncio.CancelledError):
      await one

  fake_servers.use(fake_servers.Server(_slowly), search)


def test_closing_fails_waiting_callers():
  async def search(retriever):
    waiting = asyncio.create_task(retriever.retrieve('a'))
    await asyncio.sleep(0.02)
    await retriever.close()
    with pytest.raises(protocol.RetrievalError, match='closed'):
      await waiting

  fake_servers.use(fake_servers.Server(_slowly), search)


def test_a_foreign_server_without_health_is_ready():
  fake_servers.use(
    fake_servers.Server(),
    lambda retriever: retriever.wait_until_ready(),  # 405
  )


def test_the_token_is_sent(monkeypatch):
  monkeypatch.setenv(address.TOKEN_VARIABLE, 's3cret')
  passages = [types.Passage('1', 'T', 'cat')]
  with server.embedded(passages, token='s3cret') as embedded:
    found = asyncio.run(fake_servers.retriever(embedded.url).retrieve('cat'))
  assert [passage.id for passage in found] == ['1']


def test_latencies_include_the_retries():
  busy = lambda body: web.Response(status=429, headers={'Retry-After': '0.2'})
  fake = fake_servers.Server(fake_servers.fail_once(busy))
  _, statistics = fake_servers.retrieve(fake, ['a'])
  assert 0.2 <= statistics['retrieval/latency_p50'] < 1.0


def test_any_query_of_the_policy_is_sent_as_json():
  fake = fake_servers.Server(lambda body: web.json_response({'result': [[]]}))
  query = 'naïve "quotes" \x00 \ud800 </search>\n'
  results, _ = fake_servers.retrieve(fake, [query])
  assert results == [[]] and fake.queries == [[query]]
