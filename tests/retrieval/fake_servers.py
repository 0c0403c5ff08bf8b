"""A retrieval server in the test's loop whose answers a test chooses."""

import asyncio

from aiohttp import web

from stppo_jax import types
from stppo_jax.http import server as http_server
from stppo_jax.retrieval import client
from stppo_jax.retrieval import dialects


def retriever(url, *, dialect='search_r1', **changes):
  """Returns a retriever with short timeouts."""
  options = {
    'topk': 2,
    'timeout': 5.0,
    'retries': 3,
    'ready_timeout': 0.2,
    'max_failure_rate': 0.5,
    'max_queries_per_request': 64,
  }
  return client.HttpRetriever(
    url, dialect=dialects.DIALECTS[dialect], **(options | changes)
  )


def passages_of(query):
  """Returns the passages of a query, as JSON values."""
  document = {'id': f'id {query}', 'contents': f'"About {query}"\nbody'}
  return [{'document': document, 'score': 0.5}]


def passage(query):
  """Returns the passage of a query, as the retriever returns it."""
  return types.Passage(f'id {query}', f'About {query}', 'body', 0.5)


def found(queries):
  """Returns the passages of each query, as the retriever returns them."""
  return [[passage(query)] for query in queries]


def answer(body):
  """Returns the reply of a server without faults."""
  return web.json_response(
    {'result': [passages_of(query) for query in body['queries']]}
  )


def fail_once(failure):
  """Returns a function that fails the first request only."""
  failed = []

  def respond(body):
    if failed:
      return answer(body)
    failed.append(body)
    return failure(body)

  return respond


class Server:
  """Answers with `respond(body)`; keeps its requests, as (path, body)."""

  health = None  # a subclass may have a handler of /health

  def __init__(self, respond=answer):
    self._respond = respond
    self.requests = []

  async def _handle(self, request):
    body = await request.json()
    self.requests.append((request.path, body))
    response = self._respond(body)
    return await response if asyncio.iscoroutine(response) else response

  def running(self):
    """Returns a context that serves; its value is the URL."""
    app = web.Application()
    app.router.add_post('/{path:.*}', self._handle)
    if self.health is not None:
      app.router.add_get('/health', self.health)
    return http_server.serving(app, '127.0.0.1', 0)

  @property
  def queries(self):
    return [body['queries'] for _, body in self.requests]


def use(server, do, *, path='', **options):
  """Returns what `do(retriever)` returns while a server runs."""

  async def run():
    async with server.running() as url:
      one = retriever(url + path, **options)
      try:
        return await do(one)
      finally:
        await one.close()

  return asyncio.run(run())


def retrieve(server, queries, **options):
  """Returns passages or exceptions of concurrent calls, and statistics."""

  async def do(one):
    results = await asyncio.gather(
      *(one.retrieve(query) for query in queries), return_exceptions=True
    )
    return results, one.statistics()

  return use(server, do, **options)
