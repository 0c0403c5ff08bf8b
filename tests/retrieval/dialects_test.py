"""The requests of each dialect, and how replies are read."""

import asyncio
import json

from aiohttp import web
import pytest

from stppo_jax import types
from stppo_jax.retrieval import dialects
from tests.retrieval import fake_servers


def test_search_r1_requests_have_scores():
  server = fake_servers.Server()
  results, _ = fake_servers.retrieve(server, ['cats'])
  assert results == [[fake_servers.passage('cats')]]
  assert server.requests == [
    ('/retrieve', {'queries': ['cats'], 'topk': 2, 'return_scores': True})
  ]


def test_skyrl_requests_have_one_query():
  server = fake_servers.Server(
    lambda body: fake_servers.answer({'queries': [body['query']]})
  )
  results, statistics = fake_servers.retrieve(
    server, ['cats', 'dogs'], dialect='skyrl'
  )
  assert results == [[fake_servers.passage(q)] for q in ('cats', 'dogs')]
  assert statistics['retrieval/ok'] == 2.0
  body = {'query': 'cats', 'topk': 2, 'return_scores': True}
  assert sorted(server.requests, key=str) == [
    ('/retrieve', body),
    ('/retrieve', body | {'query': 'dogs'}),
  ]


def test_the_path_of_a_dialect_may_stand_in_the_url():
  server = fake_servers.Server()

  async def run():
    async with server.running() as url:
      retriever = fake_servers.retriever(f'{url}/retrieve/')
      await retriever.retrieve('cats')

  asyncio.run(run())
  assert [path for path, _ in server.requests] == ['/retrieve']


def test_replies_may_lack_scores_and_have_more_passages_than_topk():
  def respond(body):
    bare = {'id': '1', 'contents': '"T"\nx'}
    wrapped = {'document': {'pid': '2', 'title': 'U', 'text': 'y'}}
    return web.json_response(
      {'result': [[bare, wrapped, bare] for _ in body['queries']]}
    )

  results, _ = fake_servers.retrieve(fake_servers.Server(respond), ['a'])
  assert results == [
    [types.Passage('1', 'T', 'x'), types.Passage('2', 'U', 'y')]
  ]


_DOCUMENT = {'contents': 'a'}


@pytest.mark.parametrize(
  'entry',
  [
    None,
    {},
    ['text'],
    [{'document': {}}],
    [{'document': {'contents': 3}}],
    [{'id': 10**400, 'contents': 'a'}],
    [{'document': _DOCUMENT, 'score': None}],
    [{'document': _DOCUMENT, 'score': True}],
    [{'document': _DOCUMENT, 'score': float('nan')}],
  ],
)
@pytest.mark.parametrize('name', dialects.DIALECTS)
def test_a_malformed_list_leaves_the_others_alone(name, entry):
  good = [{'document': _DOCUMENT, 'score': 1}]
  reply = json.dumps({'result': [good, entry]}).encode()
  first, second = dialects.DIALECTS[name].read(reply, 2)
  assert first == [types.Passage('', '', 'a', 1.0)] and second is None


@pytest.mark.parametrize(
  'reply',
  [
    b'<html>',
    b'\xff\xfe',
    b'[' * 100000,
    b'[]',
    b'{"results": []}',
    b'{"result": {}}',
    b'{"result": []}',
    b'{"result": [[], [], []]}',
  ],
)
@pytest.mark.parametrize('name', dialects.DIALECTS)
def test_a_reply_without_a_list_per_query_is_one_line(name, reply):
  with pytest.raises(ValueError) as error:
    dialects.DIALECTS[name].read(reply, 2)
  assert str(error.value) and '\n' not in str(error.value)
