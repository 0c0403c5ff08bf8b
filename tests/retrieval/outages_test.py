"""All searches wait while the server is away, and one request asks for it."""

import asyncio

from aiohttp import web

from stppo_jax.retrieval import protocol
from tests.retrieval import fake_servers

_QUERIES = [f'q{i}' for i in range(100)]
_CONCURRENT = 16  # requests that are sent at a time


class _Outage(fake_servers.Server):
  """A server that is away until its health was asked for a number of times.

  Attributes:
    checks: how often it was asked for.
    together: the most of these requests at the same time.
    failed: how many searches it has failed.
  """

  def __init__(self, checks_left, *, good=0, is_healthy=False):
    """Is away after `good` searches; says so unless `is_healthy`."""
    super().__init__(self._search)
    self._checks_left = checks_left
    self._good = good
    self._is_healthy = is_healthy
    self.checks = self.together = self.failed = 0
    self._now = 0

  def _search(self, body):
    self._good -= 1
    if self._checks_left and self._good < 0:
      self.failed += 1
      return web.Response(status=503)
    return fake_servers.answer(body)

  async def health(self, request):
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


def _outage(server, queries, **options):
  """Returns what was found, and the retriever's statistics."""
  return fake_servers.retrieve(
    server, queries, max_queries_per_request=1, **options
  )


def test_an_outage_fails_no_query():
  server = _Outage(5)
  found, statistics = _outage(server, _QUERIES, retries=1, ready_timeout=60.0)
  assert found == fake_servers.found(_QUERIES)
  assert server.checks == 6 and server.together == 1
  # Those that were sent before the first three had failed, and no other.
  assert 3 <= server.failed <= _CONCURRENT
  assert statistics['retrieval/outages'] == 1.0
  assert statistics['retrieval/outage_s'] > 0.0
  assert statistics['retrieval/failures'] == 0.0


def test_a_lone_search_waits_before_its_last_attempt():
  """The requests before it were answered, and it is the only one in flight."""
  server = _Outage(5, good=20)

  async def search(retriever):
    for query in _QUERIES[:21]:
      assert await retriever.retrieve(query)
    return retriever.statistics()

  statistics = fake_servers.use(server, search, retries=4, ready_timeout=60.0)
  assert server.failed == 4 and server.checks == 6
  assert statistics['retrieval/failures'] == 0.0


def test_searches_that_fail_at_a_healthy_server_end():
  server = _Outage(1, is_healthy=True)
  errors, _ = _outage(server, _QUERIES[:8], retries=4, ready_timeout=60.0)
  for error in errors:
    assert isinstance(error, protocol.RetrievalError)
    assert 'status 503' in str(error)


def test_a_rate_of_1_never_waits():
  server = _Outage(9)
  found, _ = _outage(server, _QUERIES[:20], max_failure_rate=1.0)
  assert all(isinstance(x, protocol.RetrievalError) for x in found)
  assert server.checks == 0


def test_an_outage_that_lasts_is_no_failure_of_a_query():
  queries = _QUERIES[:_CONCURRENT]
  found, statistics = _outage(
    _Outage(10**9), queries, retries=1, ready_timeout=0.1
  )
  assert statistics['retrieval/outages'] == 1.0
  assert statistics['retrieval/failures'] == 0.0
  for error in found:
    assert isinstance(error, protocol.RetrieverUnreachable)
    assert 'not ready within 0.1 s: status 503' in str(error)
