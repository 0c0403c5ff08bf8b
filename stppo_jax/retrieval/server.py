"""The retrieval server: the protocol of Search-R1 over BM25.

    POST /retrieve
         {"queries": ["..."], "topk": 3, "return_scores": true}
    200  {"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}
    POST /worlds/{world}/retrieve    the same over the passages of one world
    GET  /health                     {"status": "ok"}

There is one list per query, in order; without scores its entries are the bare
documents. The path before /retrieve is a question's `corpus`. An unknown corpus
is answered with 404, a wrong field with 422; further errors are in
`http/server.py`.
"""

import asyncio
import collections
from collections.abc import Callable
from collections.abc import Sequence
from concurrent import futures
import dataclasses
import functools
import re
from typing import Any

from stppo_jax import types
from stppo_jax.http import server as http_server
from stppo_jax.retrieval import bm25
from stppo_jax.retrieval import corpus as corpus_lib

WorldPassages = Callable[[int], Sequence[types.Passage]]
_Search = Callable[[Sequence[str], int], list[list[types.Passage]]]

# Eighteen digits fit an int64; int() takes quadratic time for long texts.
_WORLD = re.compile(r'worlds/([0-9]{1,18})')


@dataclasses.dataclass(frozen=True)
class Limits(http_server.Limits):
  """The limits of what clients may request; see `http_server.Limits` too.

  Attributes:
    max_queries: the most queries of a request.
    max_query_chars: the longest query; longer than any of an environment.
    max_topk: the most passages per query.
    max_worlds: the number of indexes that are kept; the least recently used
      one is dropped.
  """

  max_queries: int = 512
  max_query_chars: int = 4096
  max_topk: int = 100
  max_worlds: int = 64


def make_app(
  passages: Sequence[types.Passage] | None = None,
  *,
  world_passages: WorldPassages | None = None,
  token: str = '',
  limits: Limits | None = None,
):
  """Returns the server as an application to be started.

  Args:
    passages: the corpus that is served at /retrieve; None = no such corpus.
    world_passages: returns the passages of a world, served under /worlds;
      raises LookupError if there is no such world. None = no worlds.
    token: the bearer token that every request but /health needs; '' = none.
    limits: the limits of what clients may request.
  """
  limits = limits or Limits()
  service = _Service(passages, world_passages, limits)
  return http_server.application(
    get={},
    post={
      '/retrieve': service.retrieve,
      '/{corpus:.+}/retrieve': service.retrieve,
    },
    limits=limits,
    close=service.close,
    token=token,
  )


def embedded(
  passages: Sequence[types.Passage] | None = None,
  *,
  world_passages: WorldPassages | None = None,
  limits: Limits | None = None,
) -> http_server.EmbeddedServer:
  """Returns a context manager that serves `make_app` on a loopback port."""
  return http_server.EmbeddedServer(
    functools.partial(
      make_app, passages, world_passages=world_passages, limits=limits
    )
  )


class _Service:
  """The handler of retrieval requests, with its indexes."""

  def __init__(
    self,
    passages: Sequence[types.Passage] | None,
    world_passages: WorldPassages | None,
    limits: Limits,
  ):
    self._limits = limits
    self._world_passages = world_passages
    self._own = None if passages is None else bm25.Bm25Index(passages)
    self._worlds: collections.OrderedDict[int, bm25.Bm25Index] = (
      collections.OrderedDict()
    )
    # A thread of its own, so that /health answers during a search. One thread
    # suffices, because searching holds the interpreter's lock anyway, and with
    # one the table of worlds needs no lock.
    self._executor = futures.ThreadPoolExecutor(1, 'retrieval-search')

  def close(self) -> None:
    self._executor.shutdown()

  async def retrieve(
    self, fields: dict[str, Any], corpus: str = ''
  ) -> dict[str, Any]:
    search = self._search_of(corpus)
    queries, topk, return_scores = self._parse(fields)
    lists = await asyncio.get_running_loop().run_in_executor(
      self._executor, search, queries, topk
    )
    return {'result': _result(lists, return_scores)}

  def _search_of(self, corpus: str) -> _Search:
    """Returns the search function of a corpus, to run on the executor."""
    world = _WORLD.fullmatch(corpus)
    if not corpus and self._own is not None:
      return self._own.search
    if world and self._world_passages is not None:
      return functools.partial(
        self._search_world, self._world_passages, int(world[1])
      )
    raise http_server.Refusal(404, f'unknown corpus {corpus[:80]!r}')

  def _search_world(
    self,
    world_passages: WorldPassages,
    world: int,
    queries: Sequence[str],
    topk: int,
  ) -> list[list[types.Passage]]:
    if world not in self._worlds:
      try:
        passages = world_passages(world)
      except LookupError:
        raise http_server.Refusal(404, f'unknown world {world}') from None
      self._worlds[world] = bm25.Bm25Index(passages)
      if len(self._worlds) > self._limits.max_worlds:
        self._worlds.popitem(last=False)
    self._worlds.move_to_end(world)
    return self._worlds[world].search(queries, topk)

  def _parse(self, fields: dict[str, Any]) -> tuple[list[str], int, bool]:
    """Returns queries, topk and return_scores of a body, or refuses it."""
    unknown = sorted(set(fields) - {'queries', 'topk', 'return_scores'})
    if unknown:
      raise _unprocessable(f'unknown field {unknown[0][:40]!r}')
    if 'queries' not in fields:
      raise _unprocessable('queries: missing')
    # The defaults of Search-R1's server.
    fields = {'topk': 3, 'return_scores': False} | fields
    queries, topk = fields['queries'], fields['topk']
    limits = self._limits
    if not isinstance(queries, list) or not all(
      isinstance(query, str) for query in queries
    ):
      raise _unprocessable('queries: expected a list of strings')
    if len(queries) > limits.max_queries:
      raise _unprocessable(
        f'queries: {len(queries)}, at most {limits.max_queries} are allowed'
      )
    if any(len(query) > limits.max_query_chars for query in queries):
      raise _unprocessable(
        f'queries: at most {limits.max_query_chars} characters each'
      )
    if topk is None:
      topk = 3
    if type(topk) is not int or not 1 <= topk <= limits.max_topk:
      raise _unprocessable(
        f'topk: expected an integer from 1 to {limits.max_topk}'
      )
    if not isinstance(fields['return_scores'], bool):
      raise _unprocessable('return_scores: expected true or false')
    return queries, topk, fields['return_scores']


def _unprocessable(detail: str) -> http_server.Refusal:
  return http_server.Refusal(422, detail)


def _result(
  lists: list[list[types.Passage]], return_scores: bool
) -> list[list[dict[str, Any]]]:
  if not return_scores:
    return [[corpus_lib.document_of(p) for p in ps] for ps in lists]
  return [
    [
      {'document': corpus_lib.document_of(p), 'score': p.score}
      for p in passages
    ]
    for passages in lists
  ]
