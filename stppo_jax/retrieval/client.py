"""The retriever over HTTP (dialect A), made to outlive a bad network.

Queries that wait at the same time travel together. What fails is asked again,
and only that; what keeps failing raises `RetrievalError` for these queries
alone, so a fault never touches a healthy trajectory.
"""

import asyncio
import collections
from collections.abc import AsyncGenerator
from collections.abc import Sequence
import dataclasses
import random
import time

import aiohttp
import numpy as np

from stppo_jax import types
from stppo_jax.retrieval import address
from stppo_jax.retrieval import protocol
from stppo_jax.retrieval import replies
from stppo_jax.retrieval import transport

_MAX_CONCURRENT_REQUESTS = 16
_CACHED_QUERIES = 4096
_LATENCIES_KEPT = 65536
_BACKOFF = 0.25  # seconds before the first retry, doubled for each further one
_MAX_BACKOFF = 8.0  # seconds
_MAX_RETRY_AFTER = 60.0  # seconds: a wrong clock must not stop the run
_SPLIT = 4  # a suspicious batch is asked again in that many parts
_HEALTH_PERIOD = 0.2  # seconds between looks at a server that is not up

check_url = address.check_url


@dataclasses.dataclass
class _Connection:
  """All that belongs to one event loop."""

  loop: asyncio.AbstractEventLoop
  generator: AsyncGenerator[aiohttp.ClientSession, None]
  session: aiohttp.ClientSession
  requests: asyncio.Semaphore
  # By corpus, the futures of queries that wait for the next flush.
  waiting: dict[str, dict[str, asyncio.Future]]
  # Asked and not answered, by (corpus, query).
  under_way: dict[tuple[str, str], asyncio.Future]
  tasks: set[asyncio.Task]


class HttpRetriever:
  """A `protocol.Retriever` that asks a server.

  Works in whatever event loop calls it, in one at a time. Its connections
  close when that loop shuts its asynchronous generators down (`asyncio.run`
  does), or in `close`.

  Attributes:
    cache_hits, cache_misses: answers from the cache, and others, since the
      start. An answer someone else waits for already counts as a hit.
  """

  def __init__(
    self,
    url: str,
    *,
    topk: int,
    timeout: float,
    retries: int,
    start_grace: float,
    max_queries_per_request: int,
  ):
    """Makes a client; nothing is sent yet.

    A bearer token in the environment (STPPO_RETRIEVAL_TOKEN) is sent along.

    Args:
      url: http or https, see `check_url`; without corpus.
      topk: passages per query.
      timeout: seconds per request.
      retries: per query, beyond the first attempt.
      start_grace: seconds `wait_until_ready` waits.
      max_queries_per_request: a larger burst becomes several requests.

    Raises:
      ValueError: bad URL; one line.
    """
    self._url = address.base_of(url)
    self._topk = topk
    self._timeout = timeout
    self._retries = retries
    self._start_grace = start_grace
    self._max_queries = max_queries_per_request
    self._random = random.Random()
    self._connection: _Connection | None = None
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
    connection = await self._connect()
    if key in connection.under_way:
      self.cache_hits += 1
    else:
      self.cache_misses += 1
      self._enqueue(connection, key)
    # Shielded: whoever gives up must not take the answer from the others.
    return list(await asyncio.shield(connection.under_way[key]))

  async def wait_until_ready(self) -> None:
    """Asks /health until the server answers.

    Raises:
      protocol.RetrieverUnreachable: not within `start_grace` seconds.
    """
    connection = await self._connect()
    deadline = time.monotonic() + self._start_grace
    while True:
      left = max(deadline - time.monotonic(), _HEALTH_PERIOD)
      reason = await transport.why_not_ready(
        connection.session, self._url, timeout=min(self._timeout, left)
      )
      if not reason:
        return
      if time.monotonic() + _HEALTH_PERIOD > deadline:
        raise protocol.RetrieverUnreachable(
          f'retriever {self._url} not ready within {self._start_grace} s: '
          f'{reason}'
        )
      await asyncio.sleep(_HEALTH_PERIOD)

  def statistics(self) -> dict[str, float]:
    """Counts since the last call; resets them.

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
    """Gives up what is under way and closes the connections of this loop."""
    connection, self._connection = self._connection, None
    if connection is None or connection.loop.is_closed():
      return
    for task in connection.tasks:
      task.cancel()
    await asyncio.gather(*connection.tasks, return_exceptions=True)
    await connection.generator.aclose()

  def _reset_statistics(self) -> None:
    self._ok = self._num_retries = self._failures = 0
    self._latencies = collections.deque[float](maxlen=_LATENCIES_KEPT)

  async def _connect(self) -> _Connection:
    """The connection of the running loop."""
    loop = asyncio.get_running_loop()
    current = self._connection
    if current is not None and current.loop is loop:
      return current
    if current is not None and current.under_way and current.loop.is_running():
      raise RuntimeError('HttpRetriever is in use in another event loop')
    # Nothing below gives way to another task, so no other call comes between.
    generator = transport.sessions()
    self._connection = _Connection(
      loop=loop,
      generator=generator,
      session=await anext(generator),
      requests=asyncio.Semaphore(_MAX_CONCURRENT_REQUESTS),
      waiting={},
      under_way={},
      tasks=set(),
    )
    return self._connection

  def _enqueue(self, connection: _Connection, key: tuple[str, str]) -> None:
    """Puts a query among those of the next flush, and plans one."""
    corpus, query = key
    future = connection.loop.create_future()
    started = time.monotonic()

    def done(future: asyncio.Future) -> None:
      del connection.under_way[key]
      if future.exception() is not None:
        self._failures += 1
        return
      self._ok += 1
      self._latencies.append(time.monotonic() - started)
      self._cache[key] = tuple(future.result())
      if len(self._cache) > _CACHED_QUERIES:
        self._cache.popitem(last=False)

    future.add_done_callback(done)
    connection.under_way[key] = future
    if not connection.waiting:
      # Runs after all that is ready now, so a burst becomes one request.
      connection.loop.call_soon(self._flush, connection)
    connection.waiting.setdefault(corpus, {})[query] = future

  def _flush(self, connection: _Connection) -> None:
    """Sends what waits, at most `max_queries_per_request` together."""
    waiting, connection.waiting = connection.waiting, {}
    for corpus, futures in waiting.items():
      for part in _parts(list(futures), self._max_queries):
        task = connection.loop.create_task(
          self._answer(connection, corpus, {q: futures[q] for q in part})
        )
        connection.tasks.add(task)
        task.add_done_callback(connection.tasks.discard)

  async def _answer(
    self,
    connection: _Connection,
    corpus: str,
    futures: dict[str, asyncio.Future],
  ) -> None:
    """Settles the future of every query, whatever happens."""
    try:
      await self._ask(connection, corpus, futures, list(futures), 0)
    except Exception as error:
      # A bug of ours: whoever asked must see it, and not wait for ever.
      for future in futures.values():
        if not future.done():
          future.set_exception(error)
    finally:
      for future in futures.values():
        if not future.done():  # `close` cancelled us.
          future.set_exception(protocol.RetrievalError('retriever closed'))

  async def _ask(
    self,
    connection: _Connection,
    corpus: str,
    futures: dict[str, asyncio.Future],
    queries: Sequence[str],
    attempt: int,
  ) -> None:
    """Asks for `queries`; what fails is asked again, one attempt higher."""
    try:
      answers = await self._post(connection, corpus, queries)
      failure = transport.Failure('malformed list of passages')
    except transport.Failure as error:
      answers, failure = [None] * len(queries), error
    failed = []
    for query, passages in zip(queries, answers, strict=True):
      if passages is None:
        failed.append(query)
      else:
        futures[query].set_result(passages[: self._topk])
    if not failed:
      return
    if failure.permanent or attempt == self._retries:
      for query in failed:
        futures[query].set_exception(
          protocol.RetrievalError(
            f'{self._url}: {failure} (attempt {attempt + 1})'
          )
        )
      return
    self._num_retries += len(failed)
    await asyncio.sleep(self._pause(attempt, failure))
    # One query that breaks the server must not take the others with it: the
    # parts shrink, and in the last attempt everyone stands alone.
    size = len(failed)
    if failure.suspicious:
      last = attempt + 1 == self._retries
      size = 1 if last else -(-size // _SPLIT)
    await asyncio.gather(
      *(
        self._ask(connection, corpus, futures, part, attempt + 1)
        for part in _parts(failed, size)
      )
    )

  def _pause(self, attempt: int, failure: transport.Failure) -> float:
    """Seconds until the next attempt: exponential, never less than asked for.

    Jittered by half to one and a half, lest all clients return at once.
    """
    pause = min(_BACKOFF * 2**attempt, _MAX_BACKOFF)
    pause *= self._random.uniform(0.5, 1.5)
    return max(pause, min(failure.retry_after, _MAX_RETRY_AFTER))

  async def _post(
    self, connection: _Connection, corpus: str, queries: Sequence[str]
  ) -> list[list[types.Passage] | None]:
    """One request; None for a malformed list. Raises `transport.Failure`."""
    # The original server fails on return_scores: false.
    body = {'queries': list(queries), 'topk': self._topk, 'return_scores': True}
    # The timeout starts when there is room, or a burst would expire in line.
    async with connection.requests:
      reply = await transport.post(
        connection.session,
        self._url + address.path_of(corpus),
        body,
        timeout=self._timeout,
      )
    try:
      return replies.parse_result(reply, len(queries))
    except ValueError as error:
      raise transport.Failure(str(error), suspicious=True) from error


def _parts(items: list[str], size: int) -> list[list[str]]:
  return [items[i : i + size] for i in range(0, len(items), size)]
