"""The retrieval server: its protocol in detail, and its refusals."""

import json

import pytest

from stppo_jax import types
from stppo_jax.retrieval import server
from tests.http import requests

_PASSAGES = [
  types.Passage('p0', 'Paris', 'Paris is the capital of France.'),
  types.Passage('p1', 'Rome', 'Rome is the capital of Italy.'),
]


def _world(world):
  if world == 404:
    raise KeyError(world)
  return [types.Passage(f'w{world}', 'Town', f'The mayor is number{world}.')]


@pytest.fixture(scope='module')
def url():
  with server.embedded(_PASSAGES, world_passages=_world) as embedded:
    yield embedded.url


def _post(url, path='/retrieve', *, body):
  """Returns (status, text) of one request."""
  status, _, text = requests.send(url, path, json.dumps(body).encode())
  return status, text


def test_passages_come_with_and_without_scores(url):
  body = {'queries': ['Italy', 'France'], 'topk': 1, 'return_scores': True}
  status, text = _post(url, body=body)
  [[rome], [paris]] = json.loads(text)['result']
  assert status == 200 and rome.keys() == {'document', 'score'}
  assert rome['score'] > 0 and paris['document']['id'] == 'p0'
  document = {'id': 'p1', 'contents': '"Rome"\nRome is the capital of Italy.'}
  assert rome['document'] == document
  body = {'queries': ['Rome', 'xyzzy'], 'topk': 2, 'return_scores': False}
  assert json.loads(_post(url, body=body)[1])['result'] == [[document], []]
  assert _post(url, body={'queries': []}) == (200, '{"result": []}')


def test_worlds_have_indexes_of_their_own_which_are_kept_and_bounded():
  built = []

  def world_passages(world):
    built.append(world)
    return _world(world)

  with server.embedded(world_passages=world_passages) as embedded:
    for world in (*range(64), 0, 64, 0, 1):
      body = {'queries': ['mayor', 'Paris']}
      status, text = _post(embedded.url, f'/worlds/{world}/retrieve', body=body)
      [[document], []] = json.loads(text)['result']
      assert status == 200 and document['id'] == f'w{world}'
    assert _post(embedded.url, body={'queries': ['x']})[0] == 404
  # 64 fit: the last one replaces 1, which is the least recently used, not 0.
  assert built == [*range(65), 1]


@pytest.mark.parametrize(
  'path',
  [
    '/worlds/404/retrieve',
    '/worlds/-1/retrieve',
    f'/worlds/{"9" * 400}/retrieve',
    '/elsewhere/retrieve',
    '/worlds/1/../2/retrieve',
    '/other',
  ],
)
def test_an_unknown_corpus_is_404(url, path):
  status, text = _post(url, path, body={'queries': ['x']})
  assert status == 404
  _is_one_line(text)


@pytest.mark.parametrize(
  ('body', 'line'),
  [
    ({}, 'queries or query'),
    ({'queries': 'x'}, 'queries: '),
    ({'queries': ['x', 3]}, 'queries: '),
    ({'queries': ['x'] * 513}, 'at most 512'),
    ({'queries': ['x' * 4097]}, 'at most 4096 characters'),
    ({'queries': ['x'], 'topk': 0}, 'topk: '),
    ({'queries': ['x'], 'topk': 101}, 'topk: '),
    ({'queries': ['x'], 'topk': True}, 'topk: '),
    ({'queries': ['x'], 'topk': 1.0}, 'topk: '),
    ({'queries': ['x'], 'return_scores': 1}, 'return_scores: '),
    ({'queries': ['x'], 'top_k': 1}, "'top_k'"),
  ],
)
def test_a_bad_body_is_422_with_one_line(url, body, line):
  status, text = _post(url, body=body)
  assert status == 422
  assert line in _is_one_line(text)


def test_without_worlds_only_a_corpus_is_served():
  with server.embedded(_PASSAGES) as embedded:
    body = {'queries': ['x']}
    assert _post(embedded.url, '/worlds/1/retrieve', body=body)[0] == 404


def _is_one_line(text):
  detail = json.loads(text)['detail']
  assert detail and '\n' not in text and 'Traceback' not in text
  return detail
