"""A retriever over HTTP, which sends failed queries again.

Queries that wait at the same time share a request. Only queries that fail are
sent again, and only queries that keep failing raise `RetrievalError`. So the
fault of one query never harms the trajectories of other queries.
"""

import asyncio
import collections
import time

import numpy as np

from stppo_jax import types
from stppo_jax.http import address as http_address
from stppo_jax.http import client as http_client
from stppo_jax.http import outage_gate
from stppo_jax.retrieval import address
from stppo_jax.retrieval import attempts
from stppo_jax.retrieval import dialects
from stppo_jax.retrieval import protocol
from stppo_jax.retrieval import replies

_MAX_CONCURRENT_REQUESTS = 16
_LATENCIES_KEPT = 65536
_CACHED_BYTES = 64 << 20  # the most bytes that cached answers take
# If a query may have made its request fail, the request is divided into this
# many smaller requests.
_SPLIT = 4

# The statuses of a server that is ready. A server without a health endpoint
# answers with 404 or 405. It is ready, too, because the server of Search-R1
# answers only after its index is loaded.
_READY = (200, 404, 405)
_HEALTH_PATH = '/health'

_Futures = dict[str, asyncio.Future]  # query -> future of its passages


class HttpRetriever:
  """A `protocol.Retriever` that sends queries to a server.

  A client works in one event loop. Connections are closed by `close`, or at the
  end of that loop.
  """

  def __init__(
    self,
    url: str,
    *,
    dialect: dialects.Dialect,
    topk: int,
    timeout: float,
    retries: int,
    ready_timeout: float,
    max_failure_rate: float,
    max_queries_per_request: int,
    max_passage_chars: int = 1 << 16,
  ):
    """Makes a retriever; nothing is sent yet.

    If the environment variable STPPO_RETRIEVAL_TOKEN is set, requests carry its
    value as a bearer token.

    Args:
      url: the http or https URL, without the path of a corpus; see
        `address.check_url`.
      dialect: the protocol of the server.
      topk: the number of passages per query.
      timeout: the seconds that a request may take.
      retries: the most attempts per query after the first attempt.
      ready_timeout: the seconds after which `wait_until_ready` gives up.
      max_failure_rate: the share of the last requests that may fail. If more
        requests fail, all requests wait until the server is ready. If
        `ready_timeout` is 0, requests never wait.
      max_queries_per_request: the most queries in one request.
      max_passage_chars: the most characters that are kept of a passage's text.

    Raises:
      ValueError: if the URL is not valid; the message is one line.
    """
    base = http_address.base_url(
      url, suffix=dialect.path, token_variable=address.TOKEN_VARIABLE
    )
    self._gate = outage_gate.OutageGate(
      max_failure_rate,
      attempts.signals_outage,
      self.wait_until_ready,
      server=f'retriever {base}',
    )
    self._client = http_client.Client(
      base,
      timeout=timeout,
      token_variable=address.TOKEN_VARIABLE,
      max_concurrent=_MAX_CONCURRENT_REQUESTS,
      gate=self._gate if ready_timeout else None,
    )
    self._dialect = dialect
    self._topk = topk
    self._retries = retries
    self._ready_timeout = ready_timeout
    self._max_queries = 1 if dialect.one_query else max_queries_per_request
    self._max_passage_chars = max_passage_chars
    self._cache = replies.AnswerCache(_CACHED_BYTES)
    # Whether the server has ever answered a query.
    self._was_answered = False
    # Corpus -> the queries that wait for the next flush.
    self._queued: dict[str, _Futures] = {}
    # (corpus, query) -> future of every query without an answer, queued or
    # sent.
    self._in_flight: dict[tuple[str, str], asyncio.Future] = {}
    self._tasks: set[asyncio.Task] = set()
    self._reset_statistics()

  async def retrieve(
    self, query: str, *, corpus: str = ''
  ) -> list[types.Passage]:
    """See `protocol.Retriever`; concurrent calls share requests.

    Raises:
      protocol.RetrievalError: if the last retry failed; the message is one
        line.
      protocol.RetrieverMisconfigured: if no retry can help; the message is one
        line.
      protocol.RetrieverUnreachable: see `wait_until_ready`.
      ValueError: if the corpus is not a plain relative path.
    """
    address.check_corpus(corpus)
    key = corpus, query
    passages = self._cache.find(key)
    if passages is None:
      if key not in self._in_flight:
        self._enqueue(key)
      # The shield keeps the future from being cancelled together with this
      # caller, because other callers may wait for the same future.
      passages = await asyncio.shield(self._in_flight[key])
    self._counts['answers'] += 1
    self._counts['empty'] += not passages
    return list(passages)

  async def wait_until_ready(self) -> None:
    """Waits until the server's health endpoint answers.

    Raises:
      protocol.RetrieverUnreachable: if the server does not answer within
        `ready_timeout` seconds.
      protocol.RetrieverMisconfigured: if the server refuses or redirects the
        request.
    """
    try:
      await self._client.wait_until_ready(
        _HEALTH_PATH,
        grace=self._ready_timeout,
        ready_statuses=_READY,
        final_statuses=attempts.PERMANENT.difference(_READY),
      )
    except http_client.NotReady as error:
      raise protocol.RetrieverUnreachable(f'retriever {error}') from error
    except http_client.Failure as failure:
      raise self._misconfigured(_HEALTH_PATH, failure) from failure

  def statistics(self) -> dict[str, float]:
    """Returns counts since the last call, and resets them.

    `retrieval/ok` and `retrieval/failures` count queries that were sent, but no
    answers from the cache. `retrieval/failures/{cause}` counts the failures of
    each cause, and `retrieval/retries` counts all attempts after the first.
    `retrieval/latency_*` are percentiles of the seconds from query to answer,
    including retries; 0 if there was no answer. `retrieval/answers` counts all
    answers, and `retrieval/empty` counts answers without a passage.
    `retrieval/outages` counts how often all requests had to wait until the
    server was ready, and `retrieval/outage_s` adds up the seconds of waiting.
    """
    p50, p99 = np.percentile(self._latencies or [0.0], [50, 99])
    values = {
      **self._counts,
      'latency_p50': p50,
      'latency_p99': p99,
      'outages': self._gate.times_closed,
      'outage_s': self._gate.seconds_closed,
    }
    self._reset_statistics()
    return {f'retrieval/{name}': float(n) for name, n in values.items()}

  async def close(self) -> None:
    """Fails the queries in flight and closes the connections."""
    for task in self._tasks:
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)
    await self._gate.close()
    await self._client.close()

  def _reset_statistics(self) -> None:
    names = ('ok', 'retries', 'failures', 'answers', 'empty')
    self._counts = collections.Counter[str](dict.fromkeys(names, 0))
    self._latencies = collections.deque[float](maxlen=_LATENCIES_KEPT)
    self._gate.reset_statistics()

  def _enqueue(self, key: tuple[str, str]) -> None:
    """Adds a query to the queue; the first query schedules a `_flush`."""
    corpus, query = key
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    started = time.monotonic()

    def done(future: asyncio.Future) -> None:
      # Failures are not cached: the next call with this query sends it again.
      del self._in_flight[key]
      error = future.exception()
      if isinstance(error, protocol.RetrieverUnreachable):
        return  # An outage is not counted as a failure of this query.
      if error is not None:
        self._counts['failures'] += 1
        self._counts[f'failures/{getattr(error, "cause", "other")}'] += 1
        return
      self._counts['ok'] += 1
      self._latencies.append(time.monotonic() - started)
      self._cache.keep(key, tuple(future.result()))

    future.add_done_callback(done)
    self._in_flight[key] = future
    if not self._queued:
      # The flush runs after the callbacks that are ready now, so that a burst
      # of queries becomes one request.
      loop.call_soon(self._flush)
    self._queued.setdefault(corpus, {})[query] = future

  def _flush(self) -> None:
    """Sends the queued queries in requests of bounded size."""
    queued, self._queued = self._queued, {}
    for corpus, futures in queued.items():
      for chunk in _chunks(futures, self._max_queries):
        # `_tasks` keeps the task alive, because the event loop has only weak
        # references to tasks.
        task = asyncio.create_task(self._fetch(corpus, chunk))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

  async def _fetch(self, corpus: str, futures: _Futures) -> None:
    """Requests passages; completes each query's future, even after an error."""
    # Callers must not wait for ever. They get an error if `close` cancels this
    # task, if an outage lasts too long, or if this client has a bug.
    error: Exception = protocol.RetrievalError('retriever closed')
    try:
      await self._request(corpus, futures, 0)
    except Exception as raised:
      error = raised
    finally:
      for future in futures.values():
        if not future.done():
          future.set_exception(error)

  async def _request(
    self, corpus: str, futures: _Futures, attempt: int
  ) -> None:
    """Requests passages; calls itself again with the queries that failed."""
    try:
      answers = replies.clean(
        await attempts.ask(
          self._client,
          self._dialect,
          list(futures),
          corpus=corpus,
          topk=self._topk,
        ),
        topk=self._topk,
        max_chars=self._max_passage_chars,
      )
      self._was_answered |= any(answer is not None for answer in answers)
      failure = attempts.malformed()
      # A malformed list does not affect the lists of the other queries.
      may_be_query_error = False
    except http_client.Failure as error:
      answers, failure = [None] * len(futures), error
      may_be_query_error = attempts.may_be_query_error(failure)
    failed: _Futures = {}
    for (query, future), passages in zip(futures.items(), answers, strict=True):
      if passages is None:
        failed[query] = future
      else:
        future.set_result(passages)
    if not failed:
      return
    if failure.status in attempts.PERMANENT or attempt == self._retries:
      query = next(iter(failed))
      error = await self._error(corpus, query, failure, attempt)
      for future in failed.values():
        future.set_exception(error)
      return
    self._counts['retries'] += len(failed)
    await self._client.back_off(attempt, failure)
    # A query that makes the server fail must not fail the other queries of its
    # request. So each attempt divides the queries among smaller requests, and
    # the last attempt has one request for each query.
    size = len(failed)
    if may_be_query_error:
      last = attempt + 1 == self._retries
      size = 1 if last else -(-size // _SPLIT)
    await asyncio.gather(
      *(
        self._request(corpus, chunk, attempt + 1)
        for chunk in _chunks(failed, size)
      )
    )

  async def _error(
    self, corpus: str, query: str, failure: http_client.Failure, attempt: int
  ) -> Exception:
    """Returns the exception of a query whose last attempt has failed.

    If the failure may be due to the chosen dialect, and the server speaks only
    other dialects, the message names the dialects that it speaks.
    """
    if not self._was_answered and attempts.may_be_mismatch(failure):
      problems = await attempts.spoken(self._client, query, corpus=corpus)
      spoken = [name for name, problem in problems.items() if problem is None]
      if spoken and self._dialect not in map(dialects.DIALECTS.get, spoken):
        return protocol.RetrieverMisconfigured(
          f'{self._client.url}: {failure}; the server seems to speak the '
          f'dialect {" or ".join(spoken)}: set retrieval.dialect'
        )
    if failure.status in attempts.PERMANENT:
      return self._misconfigured(self._dialect.path_of(corpus), failure)
    cause = failure.cause.value.replace(' ', '_')
    return protocol.RetrievalError(
      f'{self._client.url}: {failure} (attempt {attempt + 1})',
      f'{cause}_{failure.status}' if failure.status else cause,
    )

  def _misconfigured(
    self, path: str, failure: http_client.Failure
  ) -> protocol.RetrieverMisconfigured:
    return protocol.RetrieverMisconfigured(
      f'{self._client.url}{path}: {failure}; check retrieval.url, '
      f'retrieval.dialect and {address.TOKEN_VARIABLE}'
    )


def _chunks(futures: _Futures, size: int) -> list[_Futures]:
  items = list(futures.items())
  return [dict(items[i : i + size]) for i in range(0, len(items), size)]
