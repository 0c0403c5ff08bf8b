"""The retriever against a server that fails in many ways."""

import asyncio
import itertools
import time

from aiohttp import web
import pytest

from stppo_jax.retrieval import protocol
from tests.retrieval import fake_servers


@pytest.mark.parametrize(
  ('reply', 'timeout'),
  [
    ({'status': 500, 'text': 'Traceback ...'}, 30.0),
    *[({'status': status}, 30.0) for status in (503, 429, 422)],
    *[({'text': text}, 30.0) for text in ('<html>', '{"result": []}')],
    ({'text': '{"result": [[], [], []]}'}, 30.0),
    # A reply that does not end.
    ({'body': b'{"result"', 'headers': {'Content-Length': '500'}}, 0.5),
  ],
)
def test_a_failed_request_is_repeated(reply, timeout):
  failure = lambda body: web.Response(**reply)
  fake = fake_servers.Server(fake_servers.fail_once(failure))
  results, statistics = fake_servers.retrieve(fake, ['a', 'b'], timeout=timeout)
  assert results == fake_servers.found('ab')
  assert statistics['retrieval/ok'] == 2.0
  assert statistics['retrieval/retries'] == 2.0
  assert statistics['retrieval/failures'] == 0.0


def test_only_queries_with_a_malformed_list_are_repeated():
  def respond(body):
    lists = [fake_servers.passages_of(query) for query in body['queries']]
    return web.json_response({'result': [lists[0], ['text']] + lists[2:]})

  fake = fake_servers.Server(fake_servers.fail_once(respond))
  results, statistics = fake_servers.retrieve(fake, ['a', 'b', 'c'])
  assert results == fake_servers.found('abc')
  assert fake.queries == [['a', 'b', 'c'], ['b']]
  assert statistics['retrieval/retries'] == 1.0


def test_a_query_that_breaks_the_server_fails_alone():
  def respond(body):
    if 'poison' in body['queries']:
      return web.Response(status=500)
    return fake_servers.answer(body)

  queries = [f'q{i}' for i in range(20)]
  for retries in (1, 3):
    results, statistics = fake_servers.retrieve(
      fake_servers.Server(respond), [*queries, 'poison'], retries=retries
    )
    *healthy, failed = results
    assert healthy == fake_servers.found(queries)
    assert isinstance(failed, protocol.RetrievalError)
    assert 'status 500' in str(failed) and '\n' not in str(failed)
    assert statistics['retrieval/ok'] == 20.0
    assert statistics['retrieval/failures'] == 1.0


def test_requests_to_an_overloaded_server_are_not_split():
  fake = fake_servers.Server(lambda body: web.Response(status=503))
  results, statistics = fake_servers.retrieve(fake, ['a', 'b', 'c'], retries=2)
  assert all(isinstance(r, protocol.RetrievalError) for r in results)
  assert fake.queries == [['a', 'b', 'c']] * 3
  assert statistics['retrieval/retries'] == 6.0
  assert statistics['retrieval/failures'] == 3.0
  assert statistics['retrieval/failures/status_503'] == 3.0
  assert statistics['retrieval/latency_p99'] == 0.0


@pytest.mark.parametrize('status', [301, 302, 307, 401, 403, 404])
def test_a_permanent_failure_is_an_error_of_the_config(status):
  fake = fake_servers.Server(
    lambda body: web.Response(
      status=status, headers={'Location': '/elsewhere', 'Retry-After': '9'}
    )
  )
  [error], _ = fake_servers.retrieve(fake, ['a'])
  # Waiting does not help, so it is no outage.
  assert isinstance(error, protocol.RetrieverMisconfigured)
  assert f'/retrieve: status {status}' in str(error)
  assert 'check retrieval.url' in str(error) and '\n' not in str(error)
  paths = [path for path, _ in fake.requests]
  assert paths[0] == '/retrieve' and '/elsewhere' not in paths  # no redirect
  # Other dialects are tried only where the path may be the reason.
  assert (len(paths) > 1) == (status == 404)


def test_a_slow_answer_times_out_and_others_go_on():
  async def respond(body):
    if 'slow' in body['queries']:
      await asyncio.sleep(5)
    return fake_servers.answer(body)

  start = time.monotonic()
  results, _ = fake_servers.retrieve(
    fake_servers.Server(respond), ['a', 'slow', 'b'], timeout=0.1, retries=1
  )
  assert time.monotonic() - start < 2.0
  first, slow, last = results
  assert [first, last] == fake_servers.found('ab')
  assert isinstance(slow, protocol.RetrievalError)
  assert 'no reply within 0.1 s' in str(slow)


def test_connection_refused():
  async def run():
    async with fake_servers.Server().running() as url:
      pass  # The port was free a moment ago, and is again.
    retriever = fake_servers.retriever(url, retries=2)
    with pytest.raises(protocol.RetrievalError, match=r'\(attempt 3\)'):
      await retriever.retrieve('a')
    with pytest.raises(protocol.RetrieverUnreachable, match='within 0.2 s'):
      await retriever.wait_until_ready()
    await retriever.close()

  asyncio.run(run())


def test_thirty_percent_faults_lose_nothing():
  # Every third request fails, in turns: four attempts always reach one.
  count = itertools.count(1)

  def respond(body):
    if next(count) % 3:
      return fake_servers.answer(body)
    return web.Response(status=503)

  queries = [f'q{i}' for i in range(300)]
  results, statistics = fake_servers.retrieve(
    fake_servers.Server(respond), queries, max_queries_per_request=10, retries=6
  )
  assert results == fake_servers.found(queries)
  assert statistics['retrieval/retries'] > 0


@pytest.mark.parametrize(
  ('reply', 'cause', 'line'),
  [
    ({'status': 500, 'text': 'boom'}, 'status_500', 'boom'),
    ({'text': '<html>'}, 'malformed', "'<html>'"),
    ({'text': '{"result": []}'}, 'malformed', '0 lists'),
  ],
)
def test_a_failure_names_address_and_cause(reply, cause, line):
  server = fake_servers.Server(lambda body: web.Response(**reply))
  [error], statistics = fake_servers.retrieve(server, ['a'], retries=1)
  assert str(error).startswith('http://127.0.0.1:') and line in str(error)
  assert statistics[f'retrieval/failures/{cause}'] == 1.0


@pytest.mark.parametrize('status', [302, 401, 403])
def test_a_health_check_that_is_refused_is_an_error_of_the_config(status):
  class Refusing(fake_servers.Server):
    async def health(self, request):
      return web.Response(status=status)

  with pytest.raises(protocol.RetrieverMisconfigured, match=f'status {status}'):
    fake_servers.use(
      Refusing(),
      lambda retriever: retriever.wait_until_ready(),
      ready_timeout=60.0,
    )
