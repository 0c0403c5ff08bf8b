"""A small inference server: the completions API over a model of ours.

    POST /v1/completions            one turn, token ids in and out
    GET  /v1/models                 {"data": [{"id", "owned_by", ...}]}
    GET  /health                    {"status": "ok"}
    POST /update_weights_from_disk  {"model_path": ..., "weight_version": ...}
    GET  /model_info                {"weight_version": ...}

It speaks as much of vLLM's and SGLang's protocols as `remote.py` needs, and
computes every token anew from the whole dialogue: to be read and to test with,
not to be fast. `serving.EmbeddedServer` puts it on the loopback interface.

Errors are told as there: 400 weights that cannot be loaded, 404 model, 408 slow
body, 413 body too large, 422 bad body, 429 with Retry-After when too many
requests are under way.
"""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence
from concurrent import futures
import functools
import pathlib
from typing import Any

from aiohttp import web
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.http import server as http_server
from stppo_jax.models import functional
from stppo_jax.models import heads
from stppo_jax.models.hf import load
from stppo_jax.sampling import sampler
from stppo_jax.sampling.remote import request_fields

KIND = 'stppo_jax'  # see `completions.DIALECTS`

# What one client may ask for.
_MAX_BODY_BYTES = 4 << 20
_MAX_CONCURRENT = 1024
_BODY_TIMEOUT = 30.0  # seconds
_RETRY_AFTER = 1  # seconds, sent with 429


class ModelServer:
  """A policy, what its tokens spell, and the handlers over them.

  Args:
    name: of the model.
    policy: the model.
    params: its first weights.
    token_bytes: what each id adds to the text; further ids add nothing.
    max_length: tokens a dialogue can hold.
    weights_root: updates are read from folders below it only.

  Attributes:
    requests: fields of the completions that were answered, in order.
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
  ):
    self.requests: list[dict[str, Any]] = []
    self._name = name
    self._policy = policy
    self._params = params
    self._version = 'default'
    self._token_bytes = list(token_bytes)
    self._max_length = max_length
    self._weights_root = pathlib.Path(weights_root).resolve()
    self._under_way = 0
    # One thread: a turn is written with one set of weights.
    self._executor = futures.ThreadPoolExecutor(1, 'completions')

  def app(self) -> web.Application:
    """The server as an aiohttp application."""
    app = http_server.application(_MAX_BODY_BYTES)
    app.router.add_get('/health', self._health)
    app.router.add_get('/v1/models', self._models)
    app.router.add_get('/model_info', self._info)
    app.router.add_post('/v1/completions', self._complete)
    app.router.add_post('/update_weights_from_disk', self._update)
    app.on_cleanup.append(self._close)
    return app

  async def _close(self, app: web.Application) -> None:
    del app
    self._executor.shutdown()

  async def _health(self, request: web.Request) -> web.Response:
    del request
    return web.json_response({'status': 'ok'})

  async def _models(self, request: web.Request) -> web.Response:
    del request
    card = {'id': self._name, 'object': 'model', 'owned_by': KIND}
    card['max_model_len'] = self._max_length
    return web.json_response({'object': 'list', 'data': [card]})

  async def _info(self, request: web.Request) -> web.Response:
    del request
    return web.json_response({'weight_version': self._version})

  async def _complete(self, request: web.Request) -> web.Response:
    if self._under_way >= _MAX_CONCURRENT:
      raise http_server.too_many(_RETRY_AFTER)
    self._under_way += 1
    try:
      asked = self._parse(await http_server.json_object(request, _BODY_TIMEOUT))
      reply = await self._run(self._write, asked)
    finally:
      self._under_way -= 1
    self.requests.append(asked)
    return web.json_response(reply)

  async def _update(self, request: web.Request) -> web.Response:
    body = await http_server.json_object(request, _BODY_TIMEOUT)
    path, version = body.get('model_path'), body.get('weight_version')
    if not isinstance(path, str) or not isinstance(version, str):
      raise http_server.unprocessable(
        'model_path, weight_version: expected strings'
      )
    folder = pathlib.Path(path).resolve()
    if not folder.is_relative_to(self._weights_root):
      raise web.HTTPBadRequest(text='model_path: not below weights_root')
    try:
      await self._run(self._load, folder, version)
    except (ValueError, OSError) as error:
      raise web.HTTPBadRequest(text=str(error)) from error
    return web.json_response({'success': True, 'message': 'loaded'})

  async def _run(self, function: Callable, *args: Any) -> Any:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(self._executor, function, *args)

  def _load(self, folder: pathlib.Path, version: str) -> None:
    self._params = load.read_params(folder, self._policy.config)
    self._version = version

  def _parse(self, body: dict[str, Any]) -> dict[str, Any]:
    try:
      return request_fields.parse(
        body,
        vocab_size=self._policy.config.vocab_size,
        max_length=self._max_length,
        model=self._name,
      )
    except LookupError as error:
      raise web.HTTPNotFound(text=str(error.args[0])) from error
    except ValueError as error:
      raise http_server.unprocessable(str(error)) from error

  def _write(self, asked: dict[str, Any]) -> dict[str, Any]:
    """The reply to a completion; on the executor's thread."""
    prompt, room = asked['prompt'], asked['max_tokens']
    stops = [stop.encode() for stop in asked['stop']]
    greedy = asked['temperature'] <= 0
    sampling = sampler.Sampling(
      temperature=1.0 if greedy else asked['temperature'],
      top_k=max(asked['top_k'], 0),
      top_p=asked['top_p'],
      min_p=asked['min_p'],
    )
    tokens_1L = np.zeros((1, self._max_length), np.int32)
    tokens_1L[0, : len(prompt)] = prompt
    key = jax.random.key(asked['seed'] % 2**32)
    ids, logprobs, text, reason = [], [], b'', 'length'
    while len(ids) < room and reason == 'length':
      length = len(prompt) + len(ids)
      drawn = _next_token(
        self._params,
        tokens_1L,
        np.int32(length),
        key,
        greedy,
        policy=self._policy,
        sampling=sampling,
      )
      token_id = int(drawn.tokens_S[0])
      tokens_1L[0, length] = token_id
      ids.append(token_id)
      logprobs.append(float(drawn.logprobs_S[0]))
      text += b''.join(self._token_bytes[token_id : token_id + 1])
      if token_id in asked['stop_token_ids'] or any(s in text for s in stops):
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
      'weight_version': self._version,
      'choices': [choice],
    }


@functools.partial(jax.jit, static_argnames=('policy', 'sampling'))
def _next_token(
  params, tokens_1L, length, key, greedy, *, policy, sampling
) -> sampler.SampledTokens:
  """The token behind the first `length`; its noise depends on its position."""
  hidden_1LD = policy.hidden(params, tokens_1L)
  logits_1V = heads.logits(hidden_1LD[:, length - 1], policy.output_VD(params))
  return sampler.sample(
    logits_1V, key[None], jnp.asarray(length)[None], sampling, greedy
  )
