"""A real inference server over a tiny model, its faults, and other dialects.

The vocabulary is letters and a few pieces of tags, so that turns are texts, a
stop consists of several tokens, and a text has several encodings: a test would
fail on ids that were made from text.
"""

import asyncio
import functools
import json

from aiohttp import web
import numpy as np

from stppo_jax.sampling import engine as local_engine_lib
from stppo_jax.sampling import sampler
from stppo_jax.sampling import stops
from stppo_jax.sampling.remote import client as client_lib
from stppo_jax.sampling.remote import engine as engine_lib
from tests.models import tiny
from tests.rollout import dialogues
from tests.sampling import tiny_engine
from tests.sampling.remote import model_server

TOKENS = [b'a', b'b', b'c', b'</', b'sea', b'rch>', b'<', b'/search', b'>x']
TOKENS += [b'ab', b'</search>', b'[', b']', b'eos']
EOS = len(TOKENS) - 1
STOPS = ('</search>', 'ca')
MODEL = tiny.model(vocab_size=len(TOKENS) + 2)
PARAMS = tiny.params(MODEL)
# The same as in the options of the tiny engine.
MAX_LENGTH = tiny_engine.MAX_LENGTH
SAMPLING = sampler.Sampling(tiny_engine.TEMPERATURE)
AUTOMATON = stops.build(TOKENS, stop_strings=STOPS, eos_ids=[EOS])
TURN = 9
PROMPTS = ([0, 1, 2], [11, 4, 4, 12, 0], [3])


class Tokens(dialogues.Letters):
  """A tokenizer whose greedy encoding differs from the ids it decoded."""

  def encode_text(self, text, *, tags=()):
    ids = []
    while text:
      fits = [n for n, t in enumerate(TOKENS) if text.startswith(t.decode())]
      ids.append(max(fits, key=lambda n: len(TOKENS[n])))
      text = text[len(TOKENS[ids[-1]]) :]
    return np.array(ids, np.int32)

  def decode(self, ids):
    return b''.join(TOKENS[n] for n in ids if n < len(TOKENS)).decode()


class Faults:
  """A middleware that answers some requests for turns itself.

  Attributes:
    answers: what answers the next requests for turns, in order; None lets one
      through. A function changes the server's own reply, already parsed.
    paths: of all requests.
    tokens: the bearer tokens of all requests that had one.
    missing: a path that is answered with 404.
  """

  def __init__(self):
    self.reset()

  def reset(self):
    self.answers, self.paths, self.tokens = [], [], []
    self.missing = ''

  def middleware(self):
    @web.middleware
    async def answer(request, handler):
      return await self._answer(request, handler)

    return answer

  async def _answer(self, request, handler):
    self.paths.append(request.path)
    if 'Authorization' in request.headers:
      self.tokens.append(request.headers['Authorization'])
    if request.path == self.missing:
      raise web.HTTPNotFound
    fault = None
    if request.path in ('/generate', '/v1/completions') and self.answers:
      fault = self.answers.pop(0)
    if fault is None:
      return await handler(request)
    if callable(fault):
      reply = json.loads((await handler(request)).body)
      fault(reply)
      return web.json_response(reply)
    if fault == 'slow':
      await asyncio.sleep(1)
      return await handler(request)
    if fault == 'garbage':
      return web.Response(text='{"choices": [')
    status, headers = fault
    return web.Response(status=status, headers=headers, text='so\nsorry')


class Served:
  """A server, its faults, and engines that it samples for.

  Attributes:
    root: folder in which engines write their weights.
    model: the server.
    faults: see `Faults`.
  """

  def __init__(self, loop, root):
    self.loop = loop
    self.root = root
    self.model = model_server.ModelServer(
      MODEL, PARAMS, token_bytes=TOKENS, max_length=MAX_LENGTH
    )
    self.faults = Faults()
    self.app = self.model.app()
    self.app.middlewares.append(self.faults.middleware())
    self.url = ''

  def reset(self):
    """Restores the state at the start."""
    self.faults.reset()
    self.model.kind = 'sglang'
    self.model.requests.clear()
    self.model.weight_requests.clear()
    self.model.set_weights(PARAMS, 'default')

  def engine(self, *, timeout=20.0, retries=2, concurrency=8, **options):
    """Returns an engine of the server, which answers as SGLang does."""
    client = client_lib.EngineClient(
      options.pop('url', self.url), timeout=timeout, retries=retries
    )
    settings = dict(
      loop=self.loop,
      model='tiny',
      shape=MODEL.config,
      automaton=AUTOMATON,
      stop_strings=STOPS,
      eos_ids=[EOS],
      max_length=MAX_LENGTH,
      sampling=SAMPLING,
      concurrency=concurrency,
    )
    return engine_lib.RemoteEngine(client, **(settings | options))

  def vllm_engine(self, **options):
    """Returns an engine of the server, which answers as vLLM does from now."""
    self.model.kind = 'vllm'
    return self.engine(sampling=sampler.Sampling(1.0), **options)


@functools.cache
def local_engine():
  """Returns a local engine with the same model and weights."""
  engine = local_engine_lib.Engine(
    MODEL,
    placement=tiny_engine.placement(),
    automaton=AUTOMATON,
    options=tiny_engine.options(),
  )
  engine.publish(PARAMS, 0)
  return engine


def begin(engine, prompts=PROMPTS, *, greedy=True, group_size=1):
  """Begins a collection of short turns."""
  arrays = [p if p is None else np.array(p, np.int32) for p in prompts]
  engine.begin(
    arrays,
    tiny_engine.keys(len(prompts) * group_size),
    group_size=group_size,
    max_turn_tokens=TURN,
    greedy=greedy,
  )


def turns(engine):
  """Returns the turns of all rows in flight."""
  ended = {}
  while engine.busy:
    ended |= engine.poll()
  return ended


def assert_same_turns(ours, theirs):
  assert ours.keys() == theirs.keys()
  for row, written in ours.items():
    np.testing.assert_array_equal(written.token_ids, theirs[row].token_ids)
    np.testing.assert_allclose(
      written.logprobs, theirs[row].logprobs, atol=1e-5
    )
    assert written.stopped == theirs[row].stopped


def change_choice(**changes):
  """Returns a fault that changes fields of the only choice of vLLM."""

  def fault(reply):
    reply['choices'][0] |= changes

  return fault
