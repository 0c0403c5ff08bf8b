"""A real inference server over a tiny model, its faults, and its other tongues.

Letters and a few pieces of tags are the vocabulary, so that turns are texts, a
stop is spelled by several tokens, and what is spelled one way may be encoded
another way: ids that were re-tokenised would be found out.
"""

import asyncio
import json

from aiohttp import web
import numpy as np

from stppo_jax.sampling import sampler
from stppo_jax.sampling import stops
from stppo_jax.sampling.remote import client as client_lib
from stppo_jax.sampling.remote import engine as engine_lib
from stppo_jax.sampling.remote import server as model_server
from tests.models import tiny

TOKENS = [b'a', b'b', b'c', b'</', b'sea', b'rch>', b'<', b'/search', b'>x']
TOKENS += [b'ab', b'</search>', b'[', b']', b'eos']
EOS = len(TOKENS) - 1
STOPS = ('</search>', 'ca')
MODEL = tiny.model(vocab_size=len(TOKENS) + 2)
PARAMS = tiny.params(MODEL)
MAX_LENGTH = 40
SAMPLING = sampler.Sampling(temperature=1.3)
AUTOMATON = stops.build(TOKENS, stop_strings=STOPS, eos_id=EOS)


class Tokens:
  """Decodes to bytes' text; encodes greedily, so not what it decoded."""

  def encode_text(self, text):
    ids = []
    while text:
      fits = [n for n, t in enumerate(TOKENS) if text.startswith(t.decode())]
      ids.append(max(fits, key=lambda n: len(TOKENS[n])))
      text = text[len(TOKENS[ids[-1]]) :]
    return np.array(ids, np.int32)

  encode_prompt = encode_text

  def decode(self, ids):
    return b''.join(TOKENS[n] for n in ids if n < len(TOKENS)).decode()


class Faults:
  """A middleware that answers some completions itself.

  Attributes:
    answers: what answers the next completions, in order; None lets one
      through. A function gets the server's own reply, already parsed.
    paths: of all requests.
  """

  def __init__(self):
    self.answers = []
    self.paths = []

  def middleware(self):
    @web.middleware
    async def answer(request, handler):
      return await self._answer(request, handler)

    return answer

  async def _answer(self, request, handler):
    self.paths.append(request.path)
    if request.path != '/v1/completions':
      return await handler(request)
    fault = self.answers.pop(0) if self.answers else None
    if fault is None:
      return await handler(request)
    if callable(fault):
      reply = json.loads((await handler(request)).body)
      fault(reply)
      return web.json_response(reply)
    if fault == 'slow':
      await asyncio.sleep(3)
      return await handler(request)
    if fault == 'garbage':
      return web.Response(text='{"choices": [')
    status, headers = fault
    return web.Response(status=status, headers=headers, text='so\nsorry')


class Served:
  """A server, its faults, and engines that it plays."""

  def __init__(self, loop, root):
    self.loop = loop
    self.model = model_server.ModelServer(
      'tiny',
      MODEL,
      PARAMS,
      token_bytes=TOKENS,
      max_length=MAX_LENGTH,
      weights_root=root,
    )
    self.faults = Faults()
    self.app = self.model.app()
    self.app.middlewares.append(self.faults.middleware())
    self.app.router.add_post('/generate', self._generate)
    for path in ('/collective_rpc', '/reset_prefix_cache'):
      self.app.router.add_post(path, self._note)
    self.noted = []
    self.url = ''

  def engine(self, *, timeout=20.0, retries=2, concurrency=8, **options):
    client = client_lib.Client(
      self.loop, options.pop('url', self.url), timeout=timeout, retries=retries
    )
    settings = dict(
      loop=self.loop,
      model='tiny',
      shape=MODEL.config,
      automaton=AUTOMATON,
      stop_strings=STOPS,
      eos_id=EOS,
      max_length=MAX_LENGTH,
      sampling=SAMPLING,
      concurrency=concurrency,
    )
    return engine_lib.RemoteEngine(client, **(settings | options))

  async def _note(self, request):
    """What vLLM is told about weights."""
    self.noted.append((request.path_qs, await request.json()))
    return web.Response()

  async def _generate(self, request):
    """SGLang's own endpoint, over the same model."""
    body = await request.json()
    drawing = body['sampling_params']
    assert body['return_logprob'] is True and drawing['no_stop_trim'] is True
    asked = {
      'prompt': body['input_ids'],
      'max_tokens': drawing['max_new_tokens'],
      'seed': drawing['sampling_seed'],
    }
    same = ('temperature', 'top_k', 'top_p', 'min_p', 'stop', 'stop_token_ids')
    reply = self.model._write(asked | {name: drawing[name] for name in same})
    (choice,) = reply['choices']
    ids, logprobs = choice['token_ids'], choice['logprobs']['token_logprobs']
    told = {
      'finish_reason': {'type': choice['finish_reason']},
      'prompt_tokens': len(body['input_ids']),
      'output_token_logprobs': [[x, n, None] for x, n in zip(logprobs, ids)],
      'weight_version': reply['weight_version'],
    }
    return web.json_response({'output_ids': ids, 'meta_info': told})
