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
import os
import random
import re
import time
from urllib import parse

import aiohttp
import numpy as np
import yarl

from stppo_jax import types
from stppo_jax.retrieval import protocol
from stppo_jax.retrieval import replies
from stppo_jax.retrieval import server

_MAX_REPLY_BYTES = 64 << 20
_MAX_CONCURRENT_REQUESTS = 16
_CACHED_QUERIES = 4096
_LATENCIES_KEPT = 65536
_BACKOFF = 0.25  # seconds before the first retry, doubled for each further one
_MAX_BACKOFF = 8.0  # seconds
_MAX_RETRY_AFTER = 60.0  # seconds: a wrong clock must not stop the run
_SPLIT = 4  # a suspicious batch is asked again in that many parts
_HEALTH_PERIOD = 0.2  # seconds between looks at a server that is not up

_SEGMENT = '[A-Za-z0-9_-][A-Za-z0-9_.-]*'  # no dot in front: no '..'
_CORPUS = re.compile(f'{_SEGMENT}(/{_SEGMENT})*')
# Waiting will not change these: they are about the address or the token.
_PERMANENT = frozenset({401, 403, 404, 405})
# The server is overloaded or away; what was asked is not to blame.
_OVERLOADED = frozenset({408, 429, 502, 503, 504})


def check_url(url: str) -> str | None:
  """What is wrong with a retriever's URL, in one line; None if it is fine.

  Touches no network. A trailing /retrieve is allowed, as users write it.
  """
  if any(c.isspace() or not c.isprintable() for c in url):
    return f'{url!r} contains white space or control characters'
  try:
    parts = parse.urlsplit(url)
    port = parts.port
  except ValueError as error:
    return f'{url!r} is no URL: {error}'
  if parts.scheme not in ('http', 'https') or not parts.hostname:
    return f'{url!r} is no http:// or https:// URL'
  if port == 0:
    return f'{url!r} names port 0'
  if parts.username is not None or parts.password is not None:
    return (
      'user and password in the URL are not allowed; set a bearer token in '
      f'{server.TOKEN_VARIABLE}'
    )
  if parts.query or parts.fragment:
    return f'{url!r} has a query or a fragment'
  return None


class _Failure(Exception):
  """One request failed.

  Attributes:
    permanent: asking again is of no use.
    suspicious: one of the queries may be to blame: ask in smaller parts.
    retry_after: seconds the server asked to wait; 0 = did not.
  """

  def __init__(
    self, line, *, permanent=False, suspicious=False, retry_after=0.0
  ):
    super().__init__(line)
    self.permanent = permanent
    self.suspicious = suspicious
    self.retry_after = retry_after


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
    problem = check_url(url)
    if problem:
      raise ValueError(problem)
    self._url = url.rstrip('/').removesuffix('/retrieve').rstrip('/')
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
    if corpus and not _CORPUS.fullmatch(corpus):
      raise ValueError(f'corpus {corpus!r} is no plain relative path')
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

    A server without /health that answers at all is ready: the original one
    has none, and listens only once its index is loaded.

    Raises:
      protocol.RetrieverUnreachable: not within `start_grace` seconds.
    """
    connection = await self._connect()
    deadline = time.monotonic() + self._start_grace
    while True:
      left = deadline - time.monotonic()
      try:
        async with connection.session.get(
          _encoded(f'{self._url}/health'),
          allow_redirects=False,
          timeout=aiohttp.ClientTimeout(
            total=min(self._timeout, max(left, _HEALTH_PERIOD))
          ),
        ) as response:
          if response.status in (200, 404, 405):
            return
          reason = f'status {response.status}'
      except (aiohttp.ClientError, OSError, TimeoutError) as error:
        reason = _line(error)
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
    generator = _sessions()
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
      failure = _Failure('malformed list of passages')
    except _Failure as error:
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

  def _pause(self, attempt: int, failure: _Failure) -> float:
    """Seconds until the next attempt: exponential, never less than asked for.

    Jittered by half to one and a half, lest all clients return at once.
    """
    pause = min(_BACKOFF * 2**attempt, _MAX_BACKOFF)
    pause *= self._random.uniform(0.5, 1.5)
    return max(pause, min(failure.retry_after, _MAX_RETRY_AFTER))

  async def _post(
    self, connection: _Connection, corpus: str, queries: Sequence[str]
  ) -> list[list[types.Passage] | None]:
    """One request. Raises `_Failure`, whatever the network does."""
    path = f'/{corpus}/retrieve' if corpus else '/retrieve'
    # The original server fails on return_scores: false.
    body = {'queries': list(queries), 'topk': self._topk, 'return_scores': True}
    try:
      # The timeout starts when there is room, or a burst would expire in line.
      async with connection.requests:
        async with connection.session.post(
          _encoded(self._url + path),
          json=body,
          allow_redirects=False,
          timeout=aiohttp.ClientTimeout(total=self._timeout),
        ) as response:
          if response.status != 200:
            raise _failure_of_status(response)
          reply = await _read(response)
    except (aiohttp.ClientError, OSError) as error:
      timed_out = isinstance(error, TimeoutError)
      raise _Failure(_line(error), suspicious=timed_out) from error
    try:
      return replies.parse_result(reply, len(queries))
    except ValueError as error:
      raise _Failure(str(error), suspicious=True) from error


async def _sessions() -> AsyncGenerator[aiohttp.ClientSession, None]:
  """Yields one session and closes it when the generator is closed.

  The event loop closes a suspended generator before it ends; nothing else
  tells us that it does, and a session must not outlive its loop.
  """
  headers = {'Accept-Encoding': 'identity'}
  token = os.environ.get(server.TOKEN_VARIABLE, '')
  if token:
    headers['Authorization'] = f'Bearer {token}'
  async with aiohttp.ClientSession(
    headers=headers,
    auto_decompress=False,  # A small reply must not grow large in memory.
    cookie_jar=aiohttp.DummyCookieJar(),
    trust_env=False,  # no proxy from the environment
  ) as session:
    yield session


def _encoded(url: str) -> yarl.URL:
  return yarl.URL(url, encoded=True)


def _failure_of_status(response: aiohttp.ClientResponse) -> _Failure:
  status = response.status
  return _Failure(
    f'status {status}',
    permanent=status in _PERMANENT or 300 <= status < 400,
    suspicious=status not in _OVERLOADED,
    retry_after=replies.retry_after_seconds(
      response.headers.get('Retry-After')
    ),
  )


async def _read(response: aiohttp.ClientResponse) -> bytes:
  """The body; `_Failure` if it is too large."""
  body = bytearray()
  async for chunk in response.content.iter_any():
    body += chunk
    if len(body) > _MAX_REPLY_BYTES:
      raise _Failure(
        f'the reply exceeds {_MAX_REPLY_BYTES} bytes', suspicious=True
      )
  return bytes(body)


def _line(error: BaseException) -> str:
  text = ' '.join(str(error).split())
  return f'{type(error).__name__}: {text}' if text else type(error).__name__


def _parts(items: list[str], size: int) -> list[list[str]]:
  return [items[i : i + size] for i in range(0, len(items), size)]
