"""A small inference server: the completions API over a `functional.Model`.

    POST /v1/completions            one turn, token ids in and out
    GET  /v1/models                 {"data": [{"id", "owned_by", ...}]}
    GET  /health                    {"status": "ok"}
    POST /update_weights_from_disk  {"model_path": ..., "weight_version": ...}
    GET  /model_info                {"weight_version": ...}

It implements as much of vLLM's and SGLang's protocols as `engine.py` needs. It
is for tests and for readers and need not be fast, so it computes the whole
dialogue again for every token. `http.server.EmbeddedServer` serves it on the
loopback interface. Posts need the content type application/json. If a bearer
token is set, all requests but /health need it.

Weights that cannot be loaded are answered with 400, another model with 404,
fields that are wrong with 422; further errors are in `http/server.py`.
"""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence
from concurrent import futures
import functools
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.http import server as http_server
from stppo_jax.models import functional
from stppo_jax.models import heads
from stppo_jax.models.hf import load
from stppo_jax.parallel import compilation
from stppo_jax.sampling import sampler
from stppo_jax.sampling.remote import dialects

KIND = 'stppo_jax'  # see `dialects.DIALECTS`

_LIMITS = http_server.Limits(max_body_bytes=4 << 20, max_concurrent=1024)
# The most programs that are kept, one for each `Sampling`. Without a bound,
# clients could fill the memory.
_MAX_PROGRAMS = 16
_MAX_STOPS = 16

Fields = dict[str, Any]

# The fields that a request may set, named as in the completions API, with their
# defaults; a value must be of the default's type.
_DEFAULTS: Fields = {
  'model': '',
  'prompt': [],
  'max_tokens': 16,
  'temperature': 1.0,
  'top_k': 0,
  'top_p': 1.0,
  'min_p': 0.0,
  'seed': 0,
  'stop': [],
  'stop_token_ids': [],
}
# Only these values of further fields are served. A request may leave them out.
_FIXED: Fields = {'stream': False, 'echo': False, **dialects.COMPLETION}


class ModelServer:
  """A policy with its weights, and the handlers of requests to it.

  Attributes:
    weight_version: the label of the weights.
  """

  def __init__(
    self,
    name: str,
    policy: functional.Model,
    params: functional.Params,
    *,
    token_bytes: Sequence[bytes],
    max_length: int,
    weights_root: str | pathlib.Path,
    token: str = '',
  ):
    """Makes the handlers; `app` returns the application to start.

    Args:
      name: the model's name in requests.
      policy: the model.
      params: the first weights of the model.
      token_bytes: the bytes of each token id; further ids have none.
      max_length: the most tokens of a dialogue.
      weights_root: the folder below which weights may be loaded; links that
        lead out of it are refused.
      token: the bearer token that requests need; '' = none.
    """
    self._name = name
    self._policy = policy
    self._token = token
    self._program = functools.lru_cache(_MAX_PROGRAMS)(self._compile)
    self.set_weights(params, 'default')
    self._token_bytes = list(token_bytes)
    self._max_length = max_length
    self._weights_root = pathlib.Path(weights_root).resolve()
    # One thread, so that weights never change in the middle of a turn.
    self._executor = futures.ThreadPoolExecutor(1, 'completions')

  def app(self):
    """Returns the server as an application to be started."""
    return http_server.application(
      get={
        '/v1/models': self._models,
        '/model_info': lambda: {'weight_version': self.weight_version},
      },
      post={
        '/v1/completions': self._complete,
        '/update_weights_from_disk': self._update,
      },
      limits=_LIMITS,
      close=self._executor.shutdown,
      token=self._token,
      json_only=True,
    )

  def set_weights(self, params: functional.Params, version: str) -> None:
    """Replaces the weights."""
    self._params, self.weight_version = params, version

  def write(self, request: dialects.Request) -> Fields:
    """Returns the reply to a request."""
    stops = [stop.encode() for stop in request.stop_strings]
    prompt = list(request.prompt_ids)
    program = self._program(request.sampling)
    tokens_1L = np.zeros((1, self._max_length), np.int32)
    tokens_1L[0, : len(prompt)] = prompt
    key = jax.random.key(request.seed % 2**32)
    ids, logprobs, text, reason = [], [], b'', 'length'
    while len(ids) < request.max_tokens and reason == 'length':
      length = len(prompt) + len(ids)
      sampled = program(self._params, tokens_1L, np.int32(length), key)
      token_id = int(sampled.tokens_S[0])
      tokens_1L[0, length] = token_id
      ids.append(token_id)
      logprobs.append(float(sampled.logprobs_S[0]))
      text += b''.join(self._token_bytes[token_id : token_id + 1])
      stopped = token_id in request.stop_ids
      if stopped or any(stop in text for stop in stops):
        reason = 'stop'
    choice = {
      'text': text.decode('utf-8', 'replace'),
      'finish_reason': reason,
      'token_ids': ids,
      'prompt_token_ids': prompt,
      'logprobs': {'token_logprobs': logprobs},
    }
    return {'weight_version': self.weight_version, 'choices': [choice]}

  def _models(self) -> Fields:
    length = self._max_length
    return {
      'data': [{'id': self._name, 'owned_by': KIND, 'max_model_len': length}]
    }

  async def _complete(self, fields: Fields) -> Fields:
    return await self._run(self.write, self._parse(fields))

  async def _update(self, fields: Fields) -> Fields:
    path, version = fields.get('model_path'), fields.get('weight_version')
    if not isinstance(path, str) or not isinstance(version, str):
      line = 'model_path, weight_version: expected strings'
      raise http_server.Refusal(422, line)
    folder = pathlib.Path(path).resolve()
    if not folder.is_relative_to(self._weights_root):
      raise http_server.Refusal(400, 'model_path: not below weights_root')
    for file in folder.glob('*'):
      if not file.resolve().is_relative_to(self._weights_root):
        raise http_server.Refusal(
          400, f'{file.name}: a link out of weights_root'
        )
    try:
      await self._run(self._load, folder, version)
    except (ValueError, OSError) as error:
      raise http_server.Refusal(400, str(error)) from error
    return {'success': True}

  def _compile(self, sampling: sampler.Sampling) -> Callable:
    """Returns a new program, which is freed when the cache drops it."""
    return compilation.jit(
      functools.partial(_next_token, policy=self._policy, sampling=sampling),
      mesh=None,
      dtype=self._policy.config.dtype,
    )

  async def _run(self, function: Callable, *args: Any) -> Any:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(self._executor, function, *args)

  def _load(self, folder: pathlib.Path, version: str) -> None:
    self.set_weights(load.read_params(folder, self._policy.config), version)

  def _parse(self, fields: Fields) -> dialects.Request:
    """Returns the request of POST /v1/completions, or refuses a field."""
    require = http_server.require
    for name, value in fields.items():
      if name in _FIXED:
        fixed = json.dumps(_FIXED[name])
        require(value == _FIXED[name], f'{name}: only {fixed} is served')
      else:
        require(name in _DEFAULTS, f'unknown field {name[:40]!r}')
        kind = type(_DEFAULTS[name])
        require(_is(value, kind), f'{name}: expected {kind.__name__}')
    asked = _DEFAULTS | fields
    if asked['model'] != self._name:
      raise http_server.Refusal(404, f'no model {asked["model"][:80]!r}')
    size, most = self._policy.config.vocab_size, asked['max_tokens']
    for name in ('prompt', 'stop_token_ids'):
      known = all(type(n) is int and 0 <= n < size for n in asked[name])
      require(known, f'{name}: expected ids in [0, {size})')
    texts = all(isinstance(stop, str) and stop for stop in asked['stop'])
    fits = len(asked['stop']) <= _MAX_STOPS
    require(texts and fits, f'stop: expected up to {_MAX_STOPS} strings')
    some = bool(asked['prompt']) and most >= 1
    require(some, 'prompt, max_tokens: at least one token each')
    length, room = len(asked['prompt']) + most, self._max_length
    require(length <= room, f'{length} tokens, {room} fit')
    temperature, top_p = asked['temperature'], asked['top_p']
    require(temperature > 0, 'temperature: expected a number above 0')
    shares = 0 < top_p <= 1 and 0 <= asked['min_p'] <= 1
    require(shares, 'top_p, min_p: expected fractions')
    return dialects.Request(
      prompt_ids=asked['prompt'],
      max_tokens=most,
      sampling=sampler.Sampling(
        temperature, max(asked['top_k'], 0), top_p, asked['min_p']
      ),
      seed=asked['seed'],
      stop_strings=asked['stop'],
      stop_ids=asked['stop_token_ids'],
    )


def _is(value: Any, kind: type) -> bool:
  """Returns whether a JSON value is of a kind; an integer is a float, too."""
  if kind is float:
    return type(value) in (int, float) and math.isfinite(value)
  return type(value) is kind


def _next_token(
  params, tokens_1L, length, key, *, policy, sampling
) -> sampler.SampledTokens:
  """Samples the token at position `length`, with noise for that position."""
  hidden_1LD = policy.hidden(params, tokens_1L)
  logits_1V = heads.logits(hidden_1LD[:, length - 1], policy.output_VD(params))
  return sampler.sample(
    logits_1V,
    key[None],
    jnp.asarray(length)[None],
    sampling,
    greedy=False,
    branches=False,
  )
