"""Faults on purpose: drawn by the seed, survived by the client."""

import asyncio
import collections
import threading

import pytest

from stppo_jax import types
from stppo_jax.http import server as http_server
from stppo_jax.retrieval import faults
from stppo_jax.retrieval import protocol
from stppo_jax.retrieval import server
from stppo_jax.retrieval.indexes import bm25
from tests.retrieval import fake_servers

_PASSAGES = [types.Passage('p0', 'Paris', 'Capital of France.')]


def test_a_decision_depends_on_seed_and_key_only():
  schedule = faults.Faults(rate=0.3, seed=1)
  draws = [schedule.draw('corpus', 'query', n) for n in range(4000)]
  again = faults.Faults(rate=0.3, seed=1)
  order = [again.draw('corpus', 'query', n) for n in reversed(range(4000))]
  assert draws == order[::-1]
  counts = collections.Counter(draws)
  assert set(counts) == {'', *faults.KINDS}
  assert counts[''] == pytest.approx(2800, abs=120)
  assert min(counts[kind] for kind in faults.KINDS) > 240
  other = faults.Faults(rate=0.3, seed=2)
  assert draws != [other.draw('corpus', 'query', n) for n in range(4000)]


@pytest.mark.parametrize('rate', [-0.1, 1.1, float('nan')])
def test_a_rate_that_is_no_share_is_refused(rate):
  with pytest.raises(ValueError, match='rate of faults'):
    faults.Faults(rate=rate, seed=0)


def _ask(url, queries, **options):
  async def run():
    retriever = fake_servers.retriever(url, **options)
    results = await asyncio.gather(
      *(retriever.retrieve(query) for query in queries), return_exceptions=True
    )
    await retriever.close()
    return results, retriever.statistics()

  return asyncio.run(run())


def test_all_are_answered_under_faults_on_the_wire():
  """The server breaks three tenths of its replies, as `serve` can."""
  # Made first, because its progress bar starts a thread that stays.
  index = bm25.Bm25Index(_PASSAGES)
  before = set(threading.enumerate())
  app = lambda: server.make_app(
    index,
    faults=faults.Faults(rate=0.3, seed=0),
    limits=server.Limits(retry_after=0),
  )
  queries = [f'capital {n}' for n in range(100)]
  with http_server.EmbeddedServer(app) as embedded:
    results, statistics = _ask(
      embedded.url, queries, retries=12, max_queries_per_request=1
    )
  assert [[p.id for p in passages] for passages in results] == [['p0']] * 100
  assert statistics['retrieval/ok'] == 100
  assert statistics['retrieval/retries'] > 20
  assert set(threading.enumerate()) == before


def test_faults_of_the_client_do_not_depend_on_requests():
  # The same queries fail for good, however they are batched.
  queries = [f'capital {n}' for n in range(60)]
  failed = []
  with server.embedded(_PASSAGES) as embedded:
    for size in (1, 64):
      results, statistics = _ask(
        embedded.url,
        queries,
        retries=1,
        max_queries_per_request=size,
        faults=faults.Faults(rate=0.5, seed=3),
      )
      failed.append([isinstance(r, Exception) for r in results])
      assert statistics['retrieval/failures'] == sum(failed[-1])
      assert all(isinstance(r, protocol.RetrievalError | list) for r in results)
  assert failed[0] == failed[1] and 5 < sum(failed[0]) < 30


def test_every_attempt_may_fail():
  with server.embedded(_PASSAGES) as embedded:
    (error,), statistics = _ask(
      embedded.url, ['capital'], faults=faults.Faults(rate=1.0, seed=0)
    )
  assert isinstance(error, protocol.RetrievalError)
  assert 'injected fault' in str(error) and '(attempt 4)' in str(error)
  assert statistics['retrieval/retries'] == 3
