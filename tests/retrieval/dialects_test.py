"""The requests of each dialect, and how replies are read."""

import asyncio
import contextlib
import itertools
import json
import math

import pytest

from stppo_jax import types
from stppo_jax.retrieval import dialects
from stppo_jax.retrieval import protocol
from stppo_jax.retrieval import server
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

# Dialect -> its reply with these lists of passages.
_REPLIES = {
  'rllm': lambda lists: {'results': lists[0]},
  'zerosearch': lambda lists: lists[0],
  'r1_searcher': lambda lists: {'answers': lists},
}


def _reply(name, *lists):
  of = _REPLIES.get(name, lambda lists: {'result': lists})
  return json.dumps(of(lists)).encode()


@pytest.mark.parametrize('name', dialects.DIALECTS)
def test_good_and_malformed_lists(name):
  read = dialects.DIALECTS[name].read
  good, passage, bad = _ITEMS[name]
  assert read(_reply(name, [good, good]), 1) == [[passage, passage]]
  assert read(_reply(name, []), 1) == [[]]
  for item in bad:
    assert read(_reply(name, [good, item]), 1) == [None]
  if name not in ('rllm', 'zerosearch'):  # which have one list
    for entry in (None, {}, 'text'):
      reply = _reply(name, [good], entry, [bad[0]])
      assert read(reply, 3) == [[passage], None, None]


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
    served = {
      name: stack.enter_context(server.embedded(_PASSAGES, dialect=name))
      for name in ('', *dialects.DIALECTS)
    }
    yield {name: embedded.url for name, embedded in served.items()}


def _ask(url, dialect, **options):
  async def run():
    retriever = fake_servers.retriever(url, dialect=dialect, **options)
    queries = ('italy', 'paris', 'xyzzy')
    return await asyncio.gather(*map(retriever.retrieve, queries))

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
