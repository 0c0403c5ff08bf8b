"""The requests of each dialect, and how replies are read."""

import asyncio
import contextlib
import functools
import itertools
import json
import math

from aiohttp import web
import pytest

from stppo_jax import types
from stppo_jax.http import server as http_server
from stppo_jax.retrieval import dialects
from stppo_jax.retrieval import protocol
from stppo_jax.retrieval import server
from stppo_jax.retrieval.indexes import bm25
from tests.retrieval import fake_servers

_SCORES = {'topk': 2, 'return_scores': True}


@pytest.mark.parametrize(
  ('name', 'path', 'body'),
  [
    ('search_r1', '/retrieve', {'queries': ['cats'], **_SCORES}),
    ('skyrl', '/retrieve', {'query': 'cats', **_SCORES}),
    ('rllm', '/retrieve', {'query': 'cats', 'top_k': 2}),
    ('zerosearch', '/retrieve', {'query': 'cats', 'top_k': 2}),
    ('r1_searcher', '/queries', {'queries': ['cats'], 'k': 2}),
  ],
)
def test_the_request_of_each_dialect(name, path, body):
  dialect = dialects.DIALECTS[name]
  assert (dialect.path_of(''), dialect.body(['cats'], 2)) == (path, body)


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


_P = types.Passage('1', 'T', 'a', 1.0)
_BARE = types.Passage('', 'T', 'a')
_CONTENTS = '"T"\na'
_DOCUMENT = {'id': '1', 'contents': _CONTENTS}
# Dialect -> (a good item, the passage that it is, bad items).
_ITEMS = {
  'search_r1': (
    {'document': _DOCUMENT, 'score': 1},
    _P,
    [
      *('text', {'document': {}}, {'document': {'contents': 3}}),
      {'id': 10**400, 'contents': 'a'},
      *({'document': _DOCUMENT, 'score': x} for x in (None, True, math.nan)),
    ],
  ),
  'rllm': (
    {'id': '1', 'content': _CONTENTS, 'score': 1},
    _P,
    ['text', {}, {'content': 3}, {'content': 'a', 'score': None}],
  ),
  'zerosearch': ({'text': _CONTENTS}, _BARE, ['text', {}, {'text': 3}, None]),
  'r1_searcher': (_CONTENTS, _BARE, [3, None, {}, ['a']]),
}
_ITEMS['skyrl'] = _ITEMS['search_r1']


def _reply(name, *entries):
  """Returns the reply whose lists of passages are the entries."""
  match name:
    case 'rllm':
      (entry,) = entries
      values = {'results': entry}
    case 'zerosearch':
      (values,) = entries
    case 'r1_searcher':
      values = {'answers': entries}
    case _:
      values = {'result': entries}
  return json.dumps(values).encode()


@pytest.mark.parametrize('name', dialects.DIALECTS)
def test_good_and_malformed_lists(name):
  read = dialects.DIALECTS[name].read
  good, passage, bad = _ITEMS[name]
  assert read(_reply(name, [good, good]), 1) == [[passage, passage]]
  assert read(_reply(name, []), 1) == [[]]
  for item in bad:
    assert read(_reply(name, [good, item]), 1) == [None]


@pytest.mark.parametrize('name', ['search_r1', 'skyrl', 'r1_searcher'])
@pytest.mark.parametrize('entry', [None, {}, 'text'])
def test_a_malformed_list_leaves_the_others_alone(name, entry):
  good, passage, (bad, *_) = _ITEMS[name]
  reply = _reply(name, [good], entry, [bad])
  assert dialects.DIALECTS[name].read(reply, 3) == [[passage], None, None]


@pytest.mark.parametrize(
  'reply',
  [
    *(b'<html>', b'\xff\xfe', b'[' * 100000, b'[]', b'7', b'{"other": []}'),
    *(b'{"result": {}}', b'{"result": []}', b'{"result": [[], [], []]}'),
    *(b'{"answers": [[]]}', b'{"results": {}}'),
  ],
)
@pytest.mark.parametrize('name', dialects.DIALECTS)
def test_a_reply_without_a_list_per_query_is_one_line(name, reply):
  with pytest.raises(ValueError) as error:
    dialects.DIALECTS[name].read(reply, 2)
  assert str(error.value) and '\n' not in str(error.value)


_PASSAGES = [
  types.Passage('p0', 'Paris', 'Capital of France.'),
  types.Passage('p1', 'Rome', 'Capital of Italy.'),
]


@pytest.fixture(scope='module')
def servers():
  """Returns the name of the only dialect to the URL of a server; '' = all."""
  with contextlib.ExitStack() as stack:
    urls = {}
    for name in ('', *dialects.DIALECTS):
      make = functools.partial(
        server.make_app, bm25.Bm25Index(_PASSAGES), dialect=name
      )
      embedded = http_server.EmbeddedServer(make)
      urls[name] = stack.enter_context(embedded).url
    yield urls


def _ask(url, dialect, **options):
  async def run():
    retriever = fake_servers.retriever(url, dialect=dialect, **options)
    try:
      return await asyncio.gather(
        *(retriever.retrieve(query) for query in ('italy', 'paris', 'xyzzy'))
      )
    finally:
      await retriever.close()

  return asyncio.run(run())


@pytest.mark.parametrize('name', dialects.DIALECTS)
def test_our_server_speaks_every_dialect(servers, name):
  for url in (servers[name], servers['']):
    # ZeroSearch's requests are those of rLLM, so the server must be told.
    if name != 'zerosearch' or url != servers['']:
      found = _ask(url, name)
      titles = [[(p.title, p.text) for p in passages] for passages in found]
      rome, paris = (('Rome', _PASSAGES[1].text), ('Paris', _PASSAGES[0].text))
      assert titles == [[rome], [paris], []]


@pytest.mark.parametrize(
  ('other', 'name'), list(itertools.permutations(dialects.DIALECTS, 2))
)
def test_a_mismatch_names_the_dialect_of_the_server(servers, name, other):
  with pytest.raises(protocol.RetrieverMisconfigured) as error:
    _ask(servers[other], name, retries=0)
  assert f'seems to speak the dialect {other}: set' in str(error.value)
  assert '\n' not in str(error.value)


def test_a_server_that_fails_at_first_is_no_mismatch():
  """Detection must not blame the dialect for the server's failures."""
  fake = fake_servers.Server(
    lambda body: web.json_response({'detail': 'bug'}, status=500)
  )
  results, _ = fake_servers.retrieve(fake, ['cats'], retries=1)
  assert isinstance(results[0], protocol.RetrievalError)
