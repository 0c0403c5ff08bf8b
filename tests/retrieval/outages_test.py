"""All searches wait while the server is away, and one request asks for it."""

import asyncio
import contextlib

from aiohttp import web

from stppo_jax.http import server as http_server
from stppo_jax.retrieval import protocol
from tests.retrieval import fake_servers

_QUERIES = [f'q{i}' for i in range(100)]
_CONCURRENT = 16  # requests that are sent at a time


class _Outage:
  """A server that is away until its health was asked for a number of times.

  Attributes:
    checks: how often it was asked for.
    together: the most of these requests at the same time.
    failed: how many searches it has failed.
  """

  def __init__(self, checks_left, *, good=0, is_healthy=False):
    """Is away after `good` searches; says so unless `is_healthy`."""
    self._checks_left = checks_left
    self._good = good
    self._is_healthy = is_healthy
    self.checks = self.together = self.failed = 0
    self._now = 0

  async def _search(self, request):
    body = await request.json()
    self._good -= 1
    if self._checks_left and self._good < 0:
      self.failed += 1
      return web.Response(status=503)
    return fake_servers.answer(body)

  async def _health(self, request):
    del request
    self.checks += 1
    self._now += 1
    self.together = max(self.together, self._now)
    await asyncio.sleep(0)  # another one would come now
    self._now -= 1
    if self._checks_left and not self._is_healthy:
      self._checks_left -= 1
      return web.Response(status=503)
    return web.Response()

  @contextlib.asynccontextmanager
  async def running(self):
    """Serves in the context; yields the URL."""
    app = web.Application()
    app.router.add_post('/retrieve', self._search)
    app.router.add_get('/health', self._health)
    async with http_server.serving(app, '127.0.0.1', 0) as url:
      yield url


async def _ask(retriever, queries):
  asked = [retriever.retrieve(query) for query in queries]
  return await asyncio.gather(*asked, return_exceptions=True)


def _outage(checks_left, queries, **options):
  """Returns the server, what was found, and the retriever's statistics."""
  server = _Outage(checks_left)

  async def run():
    async with server.running() as url:
      retriever = fake_servers.retriever(
        url, max_queries_per_request=1, **options
      )
      found = await _ask(retriever, queries)
      await retriever.close()
      return found, retriever.statistics()

  return server, *asyncio.run(run())


def test_an_outage_fails_no_query():
  server, found, statistics = _outage(
    5, _QUERIES, retries=1, ready_timeout=60.0
  )
  assert found == [[fake_servers.passage(query)] for query in _QUERIES]
  assert server.checks == 6 and server.together == 1
  # Those that were sent before the first three had failed, and no other.
  assert 3 <= server.failed <= _CONCURRENT
  assert statistics['retrieval/outages'] == 1.0
  assert statistics['retrieval/outage_s'] > 0.0
  assert statistics['retrieval/failures'] == 0.0


def test_a_lone_search_waits_before_its_last_attempt():
  """The requests before it were answered, and it is the only one in flight."""
  server = _Outage(5, good=20)

  async def run():
    async with server.running() as url:
      retriever = fake_servers.retriever(url, retries=4, ready_timeout=60.0)
      for query in _QUERIES[:21]:
        assert await retriever.retrieve(query)
      await retriever.close()
      return retriever.statistics()

  statistics = asyncio.run(run())
  assert server.failed == 4 and server.checks == 6
  assert statistics['retrieval/failures'] == 0.0


def test_searches_that_fail_at_a_healthy_server_end():
  server = _Outage(1, is_healthy=True)

  async def run():
    async with server.running() as url:
      retriever = fake_servers.retriever(
        url, max_queries_per_request=1, retries=4, ready_timeout=60.0
      )
      found = await _ask(retriever, _QUERIES[:8])
      await retriever.close()
      return found

  for error in asyncio.run(run()):
    assert isinstance(error, protocol.RetrievalError)
    assert 'status 503' in str(error)


def test_requests_that_seldom_fail_do_not_wait():
  server, found, statistics = _outage(0, _QUERIES)
  assert found == [[fake_servers.passage(query)] for query in _QUERIES]
  assert server.checks == statistics['retrieval/outages'] == 0


def test_a_rate_of_1_never_waits():
  server, found, _ = _outage(9, _QUERIES[:20], max_failure_rate=1.0)
  assert all(isinstance(x, protocol.RetrievalError) for x in found)
  assert server.checks == 0


def test_an_outage_that_lasts_is_no_failure_of_a_query():
  queries = _QUERIES[:_CONCURRENT]
  _, found, statistics = _outage(10**9, queries, retries=1, ready_timeout=0.1)
  assert statistics['retrieval/outages'] == 1.0
  assert statistics['retrieval/failures'] == 0.0
  for error in found:
    assert isinstance(error, protocol.RetrieverUnreachable)
    assert 'not ready within 0.1 s: status 503' in str(error)
