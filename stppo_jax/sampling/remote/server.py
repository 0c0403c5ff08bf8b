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
import collections
from collections.abc import Callable
from collections.abc import Sequence
from concurrent import futures
import functools
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
from stppo_jax.sampling.remote import request_fields

KIND = 'stppo_jax'  # see `dialects.DIALECTS`

_LIMITS = http_server.Limits(max_body_bytes=4 << 20, max_concurrent=1024)
# The most programs, one for each `Sampling`, and the most requests that are
# kept. Without a bound, clients could fill the memory.
_MAX_PROGRAMS = 16
_MAX_COMPLETIONS = 4096

Fields = dict[str, Any]


class ModelServer:
  """A policy with its weights, and the handlers of requests to it.

  Attributes:
    completions: the last requests that were answered, in order.
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
    self.completions: collections.deque[request_fields.Completion] = (
      collections.deque(maxlen=_MAX_COMPLETIONS)
    )
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
      get={'/v1/models': self._models, '/model_info': self._info},
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

  def write(self, completion: request_fields.Completion) -> Fields:
    """Returns the reply to a completion."""
    stops = [stop.encode() for stop in completion.stop]
    greedy = completion.temperature <= 0
    sampling = sampler.Sampling(
      temperature=1.0 if greedy else completion.temperature,
      top_k=max(completion.top_k, 0),
      top_p=completion.top_p,
      min_p=completion.min_p,
    )
    prompt = completion.prompt
    tokens_1L = np.zeros((1, self._max_length), np.int32)
    tokens_1L[0, : len(prompt)] = prompt
    key = jax.random.key(completion.seed % 2**32)
    ids, logprobs, text, reason = [], [], b'', 'length'
    while len(ids) < completion.max_tokens and reason == 'length':
      length = len(prompt) + len(ids)
      sampled = self._program(sampling)(
        self._params, tokens_1L, np.int32(length), key, greedy
      )
      token_id = int(sampled.tokens_S[0])
      tokens_1L[0, length] = token_id
      ids.append(token_id)
      logprobs.append(float(sampled.logprobs_S[0]))
      text += b''.join(self._token_bytes[token_id : token_id + 1])
      stopped = token_id in completion.stop_token_ids
      if stopped or any(stop in text for stop in stops):
        reason = 'stop'
    choice = {
      'index': 0,
      'text': text.decode('utf-8', 'replace'),
      'finish_reason': reason,
      'token_ids': ids,
      'prompt_token_ids': prompt,
      'logprobs': {'token_logprobs': logprobs},
    }
    return {
      'object': 'text_completion',
      'model': self._name,
      'weight_version': self.weight_version,
      'choices': [choice],
    }

  def _models(self) -> Fields:
    card = {
      'id': self._name,
      'object': 'model',
      'owned_by': KIND,
      'max_model_len': self._max_length,
    }
    return {'object': 'list', 'data': [card]}

  def _info(self) -> Fields:
    return {'weight_version': self.weight_version}

  async def _complete(self, fields: Fields) -> Fields:
    completion = self._parse(fields)
    reply = await self._run(self.write, completion)
    self.completions.append(completion)
    return reply

  async def _update(self, fields: Fields) -> Fields:
    path, version = fields.get('model_path'), fields.get('weight_version')
    if not isinstance(path, str) or not isinstance(version, str):
      raise http_server.Refusal(
        422, 'model_path, weight_version: expected strings'
      )
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
    return {'success': True, 'message': 'loaded'}

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

  def _parse(self, fields: Fields) -> request_fields.Completion:
    try:
      return request_fields.parse(
        fields,
        vocab_size=self._policy.config.vocab_size,
        max_length=self._max_length,
        model=self._name,
      )
    except LookupError as error:
      raise http_server.Refusal(404, str(error.args[0])) from error
    except ValueError as error:
      raise http_server.Refusal(422, str(error)) from error


def _next_token(
  params, tokens_1L, length, key, greedy, *, policy, sampling
) -> sampler.SampledTokens:
  """Samples the token at position `length`, with noise for that position."""
  hidden_1LD = policy.hidden(params, tokens_1L)
  logits_1V = heads.logits(hidden_1LD[:, length - 1], policy.output_VD(params))
  return sampler.sample(
    logits_1V, key[None], jnp.asarray(length)[None], sampling, greedy
  )
