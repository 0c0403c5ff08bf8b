"""The retrieval server: the protocol of Search-R1 over BM25.

    POST /retrieve
         {"queries": ["..."], "topk": 3, "return_scores": true}
    200  {"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}
    POST /worlds/{world}/retrieve    the same over the passages of one world
    GET  /health                     {"status": "ok"}

One list per query, in order; without scores the documents stand bare. What
precedes /retrieve is a question's `corpus`. An unknown corpus is answered with
404, fields that are wrong with 422; further errors are in `http/server.py`.
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

# Eighteen digits fit an int64, and int() of a longer text costs its square.
_WORLD = re.compile(r'worlds/([0-9]{1,18})')


@dataclasses.dataclass(frozen=True)
class Limits(http_server.Limits):
  """The limits of what clients may request; see `http_server.Limits` too.

  Attributes:
    max_queries: per request.
    max_query_chars: per query; beyond what an environment lets through.
    max_topk: passages per query.
    max_worlds: indexes kept; the one not used for longest is dropped.
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
    passages: the server's own corpus, served at /retrieve; None has none.
    world_passages: returns the passages of a world, served under /worlds;
      raises LookupError where there is no such world. None serves no worlds.
    token: bearer token that every request but /health must show; '' = none.
    limits: what clients may ask for.
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
  """Returns the server of `make_app` on a loopback port, to be entered."""
  return http_server.EmbeddedServer(
    functools.partial(
      make_app, passages, world_passages=world_passages, limits=limits
    )
  )


class _Service:
  """The handler with its indexes."""

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
    # One thread: searching holds the interpreter anyway, /health stays quick,
    # and the table of worlds needs no lock.
    self._executor = futures.ThreadPoolExecutor(1, 'retrieval-search')

  def close(self) -> None:
    self._executor.shutdown()

  async def retrieve(
    self, fields: dict[str, Any], corpus: str = ''
  ) -> dict[str, Any]:
    search = self._search_of(corpus)
    queries, topk, return_scores = self._parse(fields)
    found = await asyncio.get_running_loop().run_in_executor(
      self._executor, search, queries, topk
    )
    return {'result': _result(found, return_scores)}

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
    # What the original server does where these two are left out.
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
  found: list[list[types.Passage]], return_scores: bool
) -> list[list[dict[str, Any]]]:
  if not return_scores:
    return [[corpus_lib.document_of(p) for p in ps] for ps in found]
  return [
    [
      {'document': corpus_lib.document_of(p), 'score': p.score}
      for p in passages
    ]
    for passages in found
  ]
