"""The retrieval server: Search-R1's protocol ("dialect A") over BM25.

    POST /retrieve
         {"queries": ["..."], "topk": 3, "return_scores": true}
    200  {"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}
    POST /worlds/{world}/retrieve    the same over the passages of one world
    GET  /health                     {"status": "ok"}

One list per query, in order; without scores the documents stand bare. What
precedes /retrieve is a question's `corpus`. Errors are told as in `serving`:
401 token, 404 corpus, 408 slow body, 413 body too large, 422 bad body, 429 with
Retry-After when too many requests are under way.
"""

import asyncio
import collections
from collections.abc import Callable
from collections.abc import Sequence
from concurrent import futures
import dataclasses
import functools
import hmac
import ipaddress
import re
from typing import Any

from aiohttp import web

from stppo_jax import types
from stppo_jax.http import server as http_server
from stppo_jax.retrieval import address
from stppo_jax.retrieval import bm25
from stppo_jax.retrieval import corpus as corpus_lib

TOKEN_VARIABLE = address.TOKEN_VARIABLE
WorldPassages = Callable[[int], Sequence[types.Passage]]

# Eighteen digits fit an int64, and int() of a longer text costs its square.
_WORLD = re.compile(r'worlds/([0-9]{1,18})')


@dataclasses.dataclass(frozen=True)
class Limits:
  """What one client may ask for.

  Attributes:
    max_body_bytes: of a request; above it, 413.
    max_queries: per request.
    max_query_chars: per query; beyond what an environment lets through.
    max_topk: passages per query.
    max_concurrent: requests under way; above it, 429.
    retry_after: seconds, sent with 429.
    body_timeout: seconds a client may take to send its body.
    max_worlds: indexes kept; the one not used for longest is dropped.
  """

  max_body_bytes: int = 1 << 20
  max_queries: int = 512
  max_query_chars: int = 4096
  max_topk: int = 100
  max_concurrent: int = 64
  retry_after: int = 1
  body_timeout: float = 30.0
  max_worlds: int = 64


def make_app(
  passages: Sequence[types.Passage] | None = None,
  *,
  world_passages: WorldPassages | None = None,
  token: str = '',
  limits: Limits | None = None,
) -> web.Application:
  """The server as an aiohttp application.

  Args:
    passages: the server's own corpus, served at /retrieve; None has none.
    world_passages: gives the passages of a world, served under /worlds; raises
      LookupError where there is none such. None serves no worlds.
    token: bearer token every request but /health must show; '' asks none.
    limits: what one client may ask for.
  """
  service = _Service(passages, world_passages, token, limits or Limits())
  app = http_server.application(service.limits.max_body_bytes)
  app.router.add_get('/health', service.health)
  app.router.add_post('/retrieve', service.retrieve)
  app.router.add_post('/{corpus:.+}/retrieve', service.retrieve)
  app.on_cleanup.append(service.close)
  return app


def check_exposure(host: str, token: str) -> None:
  """Refuses to serve other machines without a token.

  Raises:
    ValueError: host is not a loopback address and there is no token.
  """
  try:
    loopback = ipaddress.ip_address(host).is_loopback
  except ValueError:
    loopback = host == 'localhost'
  if not loopback and not token:
    raise ValueError(
      f'host {host!r} can be reached from other machines: set a bearer token '
      f'in {TOKEN_VARIABLE}, or serve on {http_server.LOOPBACK}'
    )


def embedded(
  passages: Sequence[types.Passage] | None = None,
  *,
  world_passages: WorldPassages | None = None,
  limits: Limits | None = None,
) -> http_server.EmbeddedServer:
  """The server of `make_app` on a loopback port; see `serving`."""
  return http_server.EmbeddedServer(
    functools.partial(
      make_app, passages, world_passages=world_passages, limits=limits
    )
  )


class _Service:
  """The handlers with their state."""

  def __init__(self, passages, world_passages, token, limits):
    self.limits = limits
    self._world_passages = world_passages
    self._token = token.encode()
    self._own = None if passages is None else bm25.Bm25Index(passages)
    self._worlds: collections.OrderedDict[int, bm25.Bm25Index] = (
      collections.OrderedDict()
    )
    self._under_way = 0
    # One thread: searching holds the interpreter anyway, /health stays quick,
    # and the table of worlds needs no lock.
    self._executor = futures.ThreadPoolExecutor(1, 'retrieval-search')

  async def close(self, app: web.Application) -> None:
    del app
    self._executor.shutdown()

  async def health(self, request: web.Request) -> web.Response:
    del request
    return web.json_response({'status': 'ok'})

  async def retrieve(self, request: web.Request) -> web.Response:
    self._authorize(request)
    if self._under_way >= self.limits.max_concurrent:
      raise http_server.too_many(self.limits.retry_after)
    self._under_way += 1
    try:
      search = self._search_of(request.match_info.get('corpus', ''))
      fields = await http_server.json_object(request, self.limits.body_timeout)
      queries, topk, return_scores = self._parse(fields)
      found = await asyncio.get_running_loop().run_in_executor(
        self._executor, search, queries, topk
      )
    finally:
      self._under_way -= 1
    return web.json_response({'result': _result(found, return_scores)})

  def _authorize(self, request: web.Request) -> None:
    if not self._token:
      return
    shown = request.headers.get('Authorization', '')
    # As bytes: compare_digest takes no text beyond ASCII.
    expected = b'Bearer ' + self._token
    if not hmac.compare_digest(shown.encode('utf-8', 'replace'), expected):
      raise web.HTTPUnauthorized(
        text='a valid bearer token is needed',
        headers={'WWW-Authenticate': 'Bearer'},
      )

  def _search_of(self, corpus: str):
    """The search function of a corpus, to run on the executor."""
    world = _WORLD.fullmatch(corpus)
    if not corpus and self._own is not None:
      return self._own.search
    if world and self._world_passages is not None:
      return functools.partial(self._search_world, int(world[1]))
    raise web.HTTPNotFound(text=f'unknown corpus {corpus[:80]!r}')

  def _search_world(self, world: int, queries, topk):
    if world not in self._worlds:
      try:
        passages = self._world_passages(world)
      except LookupError:
        raise web.HTTPNotFound(text=f'unknown world {world}') from None
      self._worlds[world] = bm25.Bm25Index(passages)
      if len(self._worlds) > self.limits.max_worlds:
        self._worlds.popitem(last=False)
    self._worlds.move_to_end(world)
    return self._worlds[world].search(queries, topk)

  def _parse(self, fields: dict[str, Any]) -> tuple[list[str], int, bool]:
    """Queries, topk, return_scores of a body; 422 if it is not as it should."""
    unknown = sorted(set(fields) - {'queries', 'topk', 'return_scores'})
    if unknown:
      raise http_server.unprocessable(f'unknown field {unknown[0][:40]!r}')
    if 'queries' not in fields:
      raise http_server.unprocessable('queries: missing')
    # What the original server does where these two are left out.
    fields = {'topk': 3, 'return_scores': False} | fields
    queries, topk = fields['queries'], fields['topk']
    limits = self.limits
    if not isinstance(queries, list) or not all(
      isinstance(query, str) for query in queries
    ):
      raise http_server.unprocessable('queries: expected a list of strings')
    if len(queries) > limits.max_queries:
      raise http_server.unprocessable(
        f'queries: {len(queries)}, at most {limits.max_queries} are allowed'
      )
    if any(len(query) > limits.max_query_chars for query in queries):
      raise http_server.unprocessable(
        f'queries: at most {limits.max_query_chars} characters each'
      )
    if topk is None:
      topk = 3
    if type(topk) is not int or not 1 <= topk <= limits.max_topk:
      raise http_server.unprocessable(
        f'topk: expected an integer from 1 to {limits.max_topk}'
      )
    if not isinstance(fields['return_scores'], bool):
      raise http_server.unprocessable('return_scores: expected true or false')
    return queries, topk, fields['return_scores']


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
