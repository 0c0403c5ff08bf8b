"""The retrieval server, which answers in every dialect from one index.

    POST /retrieve
         {"queries": ["..."], "topk": 3, "return_scores": true}
    200  {"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}
    POST /worlds/{world}/retrieve    the same over the passages of one world
    GET  /health                     {"status": "ok"}

The result has one list per query, in the order of the queries. Without scores,
a list holds the bare documents. The example is in the dialect of Search-R1; a
request with the fields of another dialect in `DIALECTS` is answered in that
dialect. The path before /retrieve is a question's `corpus`, such as worlds/0,
the passages of synthetic world 0. An unknown corpus is answered with 404, and a
wrong field with 422. `http/server.py` lists the other errors.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent import futures
import functools
import re
from typing import Any, NamedTuple

from stppo_jax import types
from stppo_jax.http import server as http_server
from stppo_jax.retrieval import dialects
from stppo_jax.retrieval.indexes import backends
from stppo_jax.retrieval.indexes import bm25

WorldPassages = Callable[[int], Sequence[types.Passage]]
_Lists = list[list[types.Passage]]
_Search = Callable[[Sequence[str], int], _Lists]

# At most eighteen digits, which fit an int64, because int() takes quadratic
# time for long texts.
_WORLD = re.compile(r'worlds/([0-9]{1,18})')
_DEFAULT_TOPK = 3  # as in Search-R1's server
_MAX_TOPK = 100
_MAX_QUERIES = 512  # the most queries of a request, and of one search
_MAX_QUERY_CHARS = 4096  # the queries of environments are shorter
_MAX_WORLDS = 64  # the number of last used worlds whose indexes are kept


def make_app(
  index: backends.Index | None = None,
  *,
  world_passages: WorldPassages | None = None,
  token: str = '',
  dialect: str = '',
):
  """Returns the retrieval server as an aiohttp application.

  Args:
    index: the index that is served at /retrieve. If None, /retrieve answers
      with status 404.
    world_passages: a function that returns the passages of a world, which are
      served under /worlds. The function raises LookupError if there is no such
      world. If None, no worlds are served.
    token: the bearer token that requests need, except for /health; '' if no
      token is needed.
    dialect: the only dialect that the server speaks. If '', the server speaks
      all dialects, and chooses one by the fields of each request.
  """
  spoken = (
    [dialects.DIALECTS[dialect]] if dialect else dialects.DIALECTS.values()
  )
  service = _Service(index, world_passages)
  post = {}
  for path in dict.fromkeys(d.path for d in spoken):
    handler = service.handler([d for d in spoken if d.path == path])
    # A corpus may have slashes in it, such as worlds/0.
    post |= {path: handler, '/{corpus:.+}' + path: handler}
  return http_server.application(
    post=post, limits=http_server.Limits(), close=service.close, token=token
  )


def embedded(
  passages: Sequence[types.Passage] | None = None, **options: Any
) -> http_server.EmbeddedServer:
  """Returns a context manager that serves BM25 search on a loopback port.

  Args:
    passages: the passages of the index; None for no index.
    **options: further arguments of `make_app`.
  """
  index = lambda: None if passages is None else bm25.Bm25Index(passages)
  return http_server.EmbeddedServer(lambda: make_app(index(), **options))


class _Waiting(NamedTuple):
  """A request that waits for its search."""

  search: _Search
  queries: Sequence[str]
  topk: int
  future: asyncio.Future


class _Searches:
  """Searches on one thread; requests that wait share the next search.

  The thread keeps the event loop free to answer /health during a search. More
  threads would not help, because a search holds the interpreter's lock, or uses
  all cores anyway. With one thread, the indexes need no lock.
  """

  def __init__(self):
    self._executor = futures.ThreadPoolExecutor(1, 'retrieval-search')
    self._waiting: dict[str, list[_Waiting]] = {}  # by corpus
    self._task: asyncio.Task | None = None

  def close(self) -> None:
    self._executor.shutdown()

  async def search(
    self, corpus: str, search: _Search, queries: Sequence[str], topk: int
  ) -> _Lists:
    """Returns the passages of each query.

    Args:
      corpus: the corpus; requests for the same corpus share a search.
      search: the function that searches the corpus. Its errors are raised here.
      queries: the queries of a request.
      topk: the most passages per query.
    """
    loop = asyncio.get_running_loop()
    waiting = _Waiting(search, queries, topk, loop.create_future())
    self._waiting.setdefault(corpus, []).append(waiting)
    if self._task is None:
      self._task = loop.create_task(self._run())
    return await waiting.future

  async def _run(self) -> None:
    """Makes searches until no request waits; each search is of one corpus."""
    try:
      while self._waiting:
        # Requests that come from here on wait for the next search. Dicts keep
        # their order, so the corpus that has waited longest comes first.
        batch = self._waiting.pop(next(iter(self._waiting)))
        try:
          lists = await self._search(batch)
        except Exception as error:
          for waiting in batch:
            if not waiting.future.done():  # the client may have gone
              waiting.future.set_exception(error)
          continue
        for waiting in batch:
          # The shared search used the largest topk of the batch.
          size = len(waiting.queries)
          found, lists = lists[:size], lists[size:]
          if not waiting.future.done():
            waiting.future.set_result([ps[: waiting.topk] for ps in found])
    finally:
      self._task = None

  async def _search(self, batch: Sequence[_Waiting]) -> _Lists:
    """Returns the passages of all queries in a batch of requests."""
    loop = asyncio.get_running_loop()
    queries = [query for waiting in batch for query in waiting.queries]
    topk = max(waiting.topk for waiting in batch)
    lists: _Lists = []
    for begin in range(0, len(queries), _MAX_QUERIES):
      some = queries[begin : begin + _MAX_QUERIES]
      lists += await loop.run_in_executor(
        self._executor, batch[0].search, some, topk
      )
    return lists


class _Service:
  """The handlers of retrieval requests, with their indexes."""

  def __init__(
    self,
    index: backends.Index | None,
    world_passages: WorldPassages | None,
  ):
    self._own = index
    self._world = world_passages and functools.lru_cache(_MAX_WORLDS)(
      lambda world: bm25.Bm25Index(world_passages(world))
    )
    self._searches = _Searches()

  def close(self) -> None:
    self._searches.close()

  def handler(self, spoken: Sequence[dialects.Dialect]):
    """Returns a handler of requests in any of the dialects `spoken`."""

    async def retrieve(fields: dict[str, Any], corpus: str = '') -> Any:
      search = self._search_of(corpus)
      dialect = _dialect_of(fields, spoken)
      queries, topk, scores = self._parse(fields, dialect)
      lists = await self._searches.search(corpus, search, queries, topk)
      return dialect.write(lists, scores)

    return retrieve

  def _search_of(self, corpus: str) -> _Search:
    """Returns a function that searches a corpus; `_Searches` calls it."""
    world = _WORLD.fullmatch(corpus)
    if not corpus and self._own is not None:
      return self._own.search
    if world and self._world is not None:
      return functools.partial(_search_world, self._world, int(world[1]))
    raise http_server.Refusal(404, f'unknown corpus {corpus[:80]!r}')

  def _parse(
    self, fields: dict[str, Any], dialect: dialects.Dialect
  ) -> tuple[list[str], int, bool]:
    """Returns queries, topk and whether scores are wanted.

    Raises:
      http_server.Refusal: if a field of the request is wrong.
    """
    require, name = http_server.require, dialect.queries
    queries = [fields[name]] if dialect.one_query else fields[name]
    expected = 'a string' if dialect.one_query else 'a list of strings'
    texts = isinstance(queries, list) and all(
      isinstance(query, str) for query in queries
    )
    require(texts, f'{name}: expected {expected}')
    require(
      len(queries) <= _MAX_QUERIES
      and all(len(query) <= _MAX_QUERY_CHARS for query in queries),
      f'{name}: {len(queries)} queries; at most {_MAX_QUERIES} are allowed, of '
      f'at most {_MAX_QUERY_CHARS} characters each',
    )
    topk = fields.get(dialect.topk)
    topk = _DEFAULT_TOPK if topk is None else topk
    require(
      # `isinstance` is not used, because true would be an integer, too.
      type(topk) is int and 1 <= topk <= _MAX_TOPK,
      f'{dialect.topk}: expected an integer from 1 to {_MAX_TOPK}',
    )
    scores = fields.get(dialect.scores, False)
    require(
      isinstance(scores, bool), f'{dialect.scores}: expected true or false'
    )
    return queries, topk, scores


def _search_world(
  index_of: Callable[[int], bm25.Bm25Index],
  world: int,
  queries: Sequence[str],
  topk: int,
) -> _Lists:
  try:
    index = index_of(world)
  except LookupError:
    raise http_server.Refusal(404, f'unknown world {world}') from None
  return index.search(queries, topk)


def _dialect_of(
  fields: dict[str, Any], spoken: Sequence[dialects.Dialect]
) -> dialects.Dialect:
  """Returns the dialect that the fields of a request belong to."""
  # Several dialects share a path. A request is in the first dialect that has
  # all fields of the request.
  candidates = [d for d in spoken if d.queries in fields]
  names = ' or '.join(dict.fromkeys(d.queries for d in spoken))
  http_server.require(bool(candidates), f'{names}: missing')
  unknown = [
    sorted(set(fields) - {d.queries, d.topk, d.scores}) for d in candidates
  ]
  for dialect, rest in zip(candidates, unknown):
    if not rest:
      return dialect
  raise http_server.Refusal(422, f'unknown field {unknown[0][0][:40]!r}')
