"""The retriever over HTTP, made to outlive a bad network.

Queries that wait at the same time travel together. What fails is asked again,
and only that; what keeps failing raises `RetrievalError` for these queries
alone, so a fault never touches a healthy trajectory.
"""

import asyncio
import collections
from collections.abc import Sequence
import dataclasses
import time
from typing import TypeVar

import numpy as np

from stppo_jax import types
from stppo_jax.http import address as http_address
from stppo_jax.http import client as http_client
from stppo_jax.retrieval import address
from stppo_jax.retrieval import dialects
from stppo_jax.retrieval import protocol

_MAX_CONCURRENT_REQUESTS = 16
_LATENCIES_KEPT = 65536
_SPLIT = 4  # a suspicious request is repeated as that many smaller ones

# Waiting will not change these: they are about the address or the token.
_PERMANENT = frozenset({401, 403, 404, 405, *range(300, 400)})
# The server is overloaded or away; no query is to blame.
_OVERLOADED = frozenset({408, 429, 502, 503, 504})
# A server without a health endpoint that answers at all is ready: the original
# one listens only once its index is loaded.
_READY = (200, 404, 405)

_Item = TypeVar('_Item')


@dataclasses.dataclass
class _Pending:
  """The queries of one event loop that have no answer yet."""

  loop: asyncio.AbstractEventLoop
  # By corpus, the futures of queries that wait for the next flush.
  queued: dict[str, dict[str, asyncio.Future]]
  # Queued or sent, by (corpus, query).
  in_flight: dict[tuple[str, str], asyncio.Future]
  tasks: set[asyncio.Task]


class HttpRetriever:
  """A `protocol.Retriever` that asks a server.

  Works in whatever event loop calls it, in one at a time. Its connections
  close at the end of that loop, or in `close`.

  Attributes:
    cache_hits, cache_misses: answers from the cache, and others, since the
      start. An answer that another caller waits for already counts as a hit.
  """

  def __init__(
    self,
    url: str,
    *,
    dialect: dialects.Dialect,
    topk: int,
    timeout: float,
    retries: int,
    start_grace: float,
    max_queries_per_request: int,
    cached_queries: int = 4096,
    max_reply_bytes: int = http_client.MAX_REPLY_BYTES,
    pauses: http_client.Pauses = http_client.PAUSES,
  ):
    """Makes a retriever; nothing is sent yet.

    A bearer token in the environment (STPPO_RETRIEVAL_TOKEN) is sent along.

    Args:
      url: http or https, see `address.check_url`; without corpus.
      dialect: protocol of the server.
      topk: passages per query.
      timeout: seconds per request.
      retries: per query, beyond the first attempt.
      start_grace: seconds `wait_until_ready` waits.
      max_queries_per_request: a larger burst becomes several requests.
      cached_queries: answers kept; the one not used for longest is dropped.
      max_reply_bytes: a larger reply is a failure.
      pauses: how long to wait before retries and between looks at /health.

    Raises:
      ValueError: bad URL; one line.
    """
    base = http_address.base_url(
      url, suffix=dialect.path, token_variable=address.TOKEN_VARIABLE
    )
    self._client = http_client.Client(
      base,
      timeout=timeout,
      token_variable=address.TOKEN_VARIABLE,
      max_concurrent=_MAX_CONCURRENT_REQUESTS,
      max_reply_bytes=max_reply_bytes,
      pauses=pauses,
    )
    self._dialect = dialect
    self._topk = topk
    self._retries = retries
    self._start_grace = start_grace
    self._max_queries = min(
      max_queries_per_request, dialect.max_queries or max_queries_per_request
    )
    self._cached_queries = cached_queries
    self._pending: _Pending | None = None
    self._cache: collections.OrderedDict[
      tuple[str, str], tuple[types.Passage, ...]
    ] = collections.OrderedDict()
    self.cache_hits = 0
    self.cache_misses = 0
    self._reset_statistics()

  async def retrieve(
    self, query: str, *, corpus: str = ''
  ) -> list[types.Passage]:
    """See `protocol.Retriever`. Concurrent calls share requests.

    Raises:
      protocol.RetrievalError: after the last retry, one line.
      ValueError: corpus is no plain relative path.
    """
    address.check_corpus(corpus)
    key = (corpus, query)
    if key in self._cache:
      self.cache_hits += 1
      self._cache.move_to_end(key)
      return list(self._cache[key])
    pending = self._pending_here()
    if key in pending.in_flight:
      self.cache_hits += 1
    else:
      self.cache_misses += 1
      self._enqueue(pending, key)
    # Shielded: a caller that gives up must not take the answer from the others.
    return list(await asyncio.shield(pending.in_flight[key]))

  async def wait_until_ready(self) -> None:
    """Asks the server's health endpoint until it answers.

    Raises:
      protocol.RetrieverUnreachable: not within `start_grace` seconds.
    """
    try:
      await self._client.wait_until_ready(
        self._dialect.health_path,
        grace=self._start_grace,
        ready_statuses=_READY,
      )
    except http_client.NotReady as error:
      raise protocol.RetrieverUnreachable(f'retriever {error}') from error

  def statistics(self) -> dict[str, float]:
    """Returns counts since the last call, and resets them.

    `retrieval/ok` and `retrieval/failures` count queries sent (not those from
    the cache), `retrieval/retries` further attempts at one of them, and
    `retrieval/latency_*` are seconds from question to answer, retries
    included; 0 if there was none.
    """
    p50, p99 = (
      np.percentile(self._latencies, [50, 99])
      if self._latencies
      else (0.0, 0.0)
    )
    result = {
      'retrieval/ok': float(self._ok),
      'retrieval/retries': float(self._num_retries),
      'retrieval/failures': float(self._failures),
      'retrieval/latency_p50': float(p50),
      'retrieval/latency_p99': float(p99),
    }
    self._reset_statistics()
    return result

  async def close(self) -> None:
    """Fails what is in flight, and closes the connections of this loop."""
    pending, self._pending = self._pending, None
    if pending is not None and not pending.loop.is_closed():
      for task in pending.tasks:
        task.cancel()
      await asyncio.gather(*pending.tasks, return_exceptions=True)
    await self._client.close()

  def _reset_statistics(self) -> None:
    self._ok = self._num_retries = self._failures = 0
    self._latencies = collections.deque[float](maxlen=_LATENCIES_KEPT)

  def _pending_here(self) -> _Pending:
    """Returns what is pending in the running loop."""
    loop = asyncio.get_running_loop()
    current = self._pending
    if current is not None and current.loop is loop:
      return current
    if current is not None and current.in_flight and current.loop.is_running():
      raise RuntimeError('HttpRetriever is in use in another event loop')
    self._pending = _Pending(loop=loop, queued={}, in_flight={}, tasks=set())
    return self._pending

  def _enqueue(self, pending: _Pending, key: tuple[str, str]) -> None:
    """Adds a query to the next flush, and schedules one."""
    corpus, query = key
    future = pending.loop.create_future()
    started = time.monotonic()

    def done(future: asyncio.Future) -> None:
      del pending.in_flight[key]
      if future.exception() is not None:
        self._failures += 1
        return
      self._ok += 1
      self._latencies.append(time.monotonic() - started)
      self._cache[key] = tuple(future.result())
      if len(self._cache) > self._cached_queries:
        self._cache.popitem(last=False)

    future.add_done_callback(done)
    pending.in_flight[key] = future
    if not pending.queued:
      # Runs after all that is ready now, so a burst becomes one request.
      pending.loop.call_soon(self._flush, pending)
    pending.queued.setdefault(corpus, {})[query] = future

  def _flush(self, pending: _Pending) -> None:
    """Sends what is queued, at most `max_queries_per_request` together."""
    queued, pending.queued = pending.queued, {}
    for corpus, futures in queued.items():
      for queries in _chunks(list(futures), self._max_queries):
        task = pending.loop.create_task(
          self._fetch(corpus, {query: futures[query] for query in queries})
        )
        pending.tasks.add(task)
        task.add_done_callback(pending.tasks.discard)

  async def _fetch(
    self, corpus: str, futures: dict[str, asyncio.Future]
  ) -> None:
    """Ends the future of every query, whatever happens."""
    try:
      await self._request(corpus, futures, list(futures), 0)
    except Exception as error:
      # A bug of ours: the callers must see it, and not wait for ever.
      for future in futures.values():
        if not future.done():
          future.set_exception(error)
    finally:
      for future in futures.values():
        if not future.done():  # `close` cancelled us.
          future.set_exception(protocol.RetrievalError('retriever closed'))

  async def _request(
    self,
    corpus: str,
    futures: dict[str, asyncio.Future],
    queries: Sequence[str],
    attempt: int,
  ) -> None:
    """Requests passages; what fails is requested again, one attempt higher."""
    try:
      answers = await self._post(corpus, queries)
      failure = http_client.Failure(
        'malformed list of passages', http_client.Cause.MALFORMED
      )
      may_be_to_blame = False  # The other lists of the reply are fine.
    except http_client.Failure as error:
      answers, failure = [None] * len(queries), error
      may_be_to_blame = _a_query_may_be_to_blame(failure)
    failed = []
    for query, passages in zip(queries, answers, strict=True):
      if passages is None:
        failed.append(query)
      else:
        futures[query].set_result(passages[: self._topk])
    if not failed:
      return
    if failure.status in _PERMANENT or attempt == self._retries:
      for query in failed:
        futures[query].set_exception(
          protocol.RetrievalError(
            f'{self._client.url}: {failure} (attempt {attempt + 1})'
          )
        )
      return
    self._num_retries += len(failed)
    await self._client.back_off(attempt, failure)
    # One query that breaks the server must not take the others with it: the
    # requests shrink, and in the last attempt every query stands alone.
    size = len(failed)
    if may_be_to_blame:
      last = attempt + 1 == self._retries
      size = 1 if last else -(-size // _SPLIT)
    await asyncio.gather(
      *(
        self._request(corpus, futures, chunk, attempt + 1)
        for chunk in _chunks(failed, size)
      )
    )

  async def _post(
    self, corpus: str, queries: Sequence[str]
  ) -> dialects.Answers:
    """Sends one request; raises `http_client.Failure`."""
    reply = await self._client.post(
      (f'/{corpus}' if corpus else '') + self._dialect.path,
      self._dialect.body(queries, self._topk),
    )
    try:
      return self._dialect.read(reply, len(queries))
    except ValueError as error:
      raise http_client.Failure(
        str(error), http_client.Cause.MALFORMED
      ) from error


def _a_query_may_be_to_blame(failure: http_client.Failure) -> bool:
  """Returns whether smaller requests may find the query that breaks them."""
  if failure.cause is http_client.Cause.STATUS:
    return failure.status not in _OVERLOADED
  return failure.cause is not http_client.Cause.CONNECTION


def _chunks(items: list[_Item], size: int) -> list[list[_Item]]:
  return [items[i : i + size] for i in range(0, len(items), size)]
