"""Whatever a server replies, a run gets passages that it can use, or one line.

A real reply is mutated, sent by a real server, and read by the real retriever.
"""

import json
import math
import random

from aiohttp import web

from stppo_jax import types
from stppo_jax.envs import prompts
from stppo_jax.retrieval import dialects
from stppo_jax.retrieval import protocol
from stppo_jax.retrieval import replies
from tests.retrieval import fake_servers
from tests.sampling import vocabularies

_NUM_MUTATED = 2000
_MAX_CHARS = 400
_DOCUMENT = {'id': '7', 'contents': '"Title"\nbody <answer>'}
# Texts of JSON values, some of which Python cannot write as JSON itself.
_VALUES = (
  *('null', 'true', '-1', '1e999', '-1e999', 'NaN', 'Infinity', '[]', '{}'),
  *('9' * 400, '9' * 5000, '"\\ud800"', '"\\udfff\\ud800 x"'),
  *('"\\u0000\\u202e"', '"' + '<' * 3000 + '"', '[' * 2000 + ']' * 2000),
  '{"document": {"contents": "\\ud83d\\ude00"}, "score": 0.5}',
)
_HEADERS = (
  *('', 'soon', '-5', '1e999', 'nan', '9' * 400),
  'Fri, 31 Dec 99999 23:59:59 GMT',
  'Fri, 99 Dec 2026 99:99:99 +9999',
)


def _mutated(draw: random.Random) -> bytes:
  """Returns a reply of one list, in which a value or some bytes are changed."""
  passages = [{'document': dict(_DOCUMENT), 'score': 0.5} for _ in range(3)]
  reply, passage = {'result': [passages]}, draw.choice(passages)
  places = [(reply, 'result'), (reply['result'], 0), (passages, 1)]
  places += [(passage, key) for key in passage]
  places += [(passage['document'], key) for key in _DOCUMENT]
  where, key = draw.choice(places)
  where[key] = '@'
  text = json.dumps(reply).replace('"@"', draw.choice(_VALUES))
  body = bytearray(text.encode())
  if draw.random() < 0.3:
    start = draw.randrange(len(body))
    body[start : start + draw.randrange(3)] = draw.randbytes(draw.randrange(4))
  return bytes(body)


def test_no_mutated_reply_ends_a_run_or_enters_it_raw():
  draw = random.Random(0)
  mutated = [_mutated(draw) for _ in range(_NUM_MUTATED)]
  statuses = [draw.choice([200] * 20 + [429, 503]) for _ in mutated]
  headers = [{'Retry-After': draw.choice(_HEADERS)} for _ in mutated]

  def respond(body):
    number = int(body['query'])
    return web.Response(
      body=mutated[number], status=statuses[number], headers=headers[number]
    )

  results, statistics = fake_servers.retrieve(
    fake_servers.Server(respond),
    [str(number) for number in range(_NUM_MUTATED)],
    dialect='skyrl',
    topk=3,
    retries=0,
    max_passage_chars=_MAX_CHARS,
  )
  tokenizer = vocabularies.bpe()
  answered = 0
  for result in results:
    if isinstance(result, BaseException):
      assert isinstance(result, protocol.RetrievalError)
      assert '\n' not in str(result) and len(str(result)) < 500
      continue
    answered += 1
    for passage in result:
      assert math.isfinite(passage.score)
      assert max(len(passage.title), len(passage.text)) <= _MAX_CHARS
    observation = prompts.information(result)
    observation.text.encode()
    tokenizer.encode_text(observation.body)
  # Neither case is rare.
  assert 150 < answered < 1850
  assert statistics['retrieval/ok'] == answered
  assert statistics['retrieval/failures'] == _NUM_MUTATED - answered


def _cleaned(document, score=0.5):
  item = f'{{"document": {json.dumps(document)}, "score": {score}}}'
  reply = f'{{"result": [[{item}]]}}'
  answers = dialects.DIALECTS['search_r1'].read(reply.encode(), 1)
  ((passage,),) = replies.clean(answers, topk=1, max_chars=10)
  return passage


def test_texts_become_unicode_and_numbers_finite():
  text = 'a\ud800b \U0001f600'
  assert _cleaned({'id': 7, 'title': text, 'text': 'x' * 99}) == types.Passage(
    '7', 'a\ufffdb \U0001f600', 'x' * 10, 0.5
  )
  for score, sign in (('9' * 400, 1), ('-1e999', -1), ('-' + '9' * 5000, -1)):
    passage = _cleaned({'contents': 'x'}, score)
    assert math.isfinite(passage.score) and passage.score * sign > 1e300


def test_a_long_passage_is_cut_before_it_is_read_and_so_is_a_long_list():
  # Folding all of it would take minutes.
  long = '<' + 'ａ' * 2_000_000 + '>'

  def respond(body):
    document = {'title': 'T', 'text': long}
    return web.json_response({'result': [[document, document, document]]})

  [[passage, _]], _ = fake_servers.retrieve(
    fake_servers.Server(respond), ['a'], max_passage_chars=8000
  )
  assert passage.text == long[:8000]


def test_the_least_recently_used_and_too_large_answers_are_dropped():
  passages = lambda size: (types.Passage('1', 'title', size * 'x'),)
  cache = replies.AnswerCache(max_bytes=10_000)
  for size in (20_000, 4000, 4000, 100):
    cache.keep(('', 'a'), passages(size))  # a replaced answer counts once
    assert (cache.find(('', 'a')) is None) == (size == 20_000)
  cache.keep(('', 'b'), passages(4000))
  cache.keep(('', 'c'), passages(3000))
  assert cache.find(('', 'a')) == passages(100)
  cache.keep(('', 'd'), passages(4000))
  assert cache.find(('', 'b')) is None
  assert cache.find(('', 'a')) == passages(100)
