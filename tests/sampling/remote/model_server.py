"""A server of a tiny model that speaks the protocols of SGLang and vLLM.

It computes the whole dialogue again for every token, with our own model, so
that what an engine gets from it can be compared with the local engine.
"""

from aiohttp import web
import numpy as np
import scipy.special

from stppo_jax.models.hf import load
from stppo_jax.sampling import sampler
from stppo_jax.sampling.remote import dialects
from tests.models import tiny


class ModelServer:
  """A policy with its weights; `app` returns the server.

  Attributes:
    kind: the kind that the server reports.
    requests: the requests for turns, in order.
    weight_version: the label of the weights.
    weight_requests: (path and query, body) of the requests to vLLM's paths for
      weights, which load nothing.
  """

  def __init__(self, policy, params, *, token_bytes, max_length, kind='sglang'):
    self._policy = policy
    self._token_bytes = list(token_bytes)
    self._max_length = max_length
    self.kind = kind
    self.requests, self.weight_requests = [], []
    self.set_weights(params, 'default')

  def app(self):
    app = web.Application()
    app.router.add_get('/health', self._health)
    app.router.add_get('/v1/models', self._models)
    app.router.add_get('/model_info', self._model_info)
    app.router.add_post('/generate', self._generate)
    app.router.add_post('/v1/completions', self._complete)
    app.router.add_post('/update_weights_from_disk', self._update)
    for path in ('/collective_rpc', '/reset_prefix_cache'):
      app.router.add_post(path, self._record)
    return app

  def set_weights(self, params, version):
    self._params, self.weight_version = params, version

  async def _health(self, request):
    return web.Response()

  async def _models(self, request):
    model = {'id': 'tiny', 'owned_by': self.kind}
    return web.json_response(
      {'data': [model | {'max_model_len': self._max_length}]}
    )

  async def _model_info(self, request):
    return web.json_response({'weight_version': self.weight_version})

  async def _update(self, request):
    body = await request.json()
    params = load.read_params(body['model_path'], self._policy.config)
    self.set_weights(params, body['weight_version'])
    return web.json_response({'success': True})

  async def _record(self, request):
    self.weight_requests.append((request.path_qs, await request.json()))
    return web.Response()

  async def _generate(self, http_request):
    body = await http_request.json()
    params = body['sampling_params']
    assert body['return_logprob'] is True and params['no_stop_trim'] is True
    request = _request(
      params, body['input_ids'], params['max_new_tokens'], 'sampling_seed'
    )
    ids, logprobs, _, reason = self._write(request)
    meta = {
      'finish_reason': {'type': reason},
      'prompt_tokens': len(request.prompt_ids),
      'output_token_logprobs': [[x, n, None] for x, n in zip(logprobs, ids)],
      'weight_version': self.weight_version,
    }
    return web.json_response({'output_ids': ids, 'meta_info': meta})

  async def _complete(self, http_request):
    body = await http_request.json()
    request = _request(body, body['prompt'], body['max_tokens'], 'seed')
    ids, logprobs, text, reason = self._write(request)
    choice = {
      'text': text.decode('utf-8', 'replace'),
      'finish_reason': reason,
      'token_ids': ids,
      'prompt_token_ids': request.prompt_ids,
      'logprobs': {'token_logprobs': logprobs},
    }
    return web.json_response({'choices': [choice]})

  def _write(self, request):
    """Returns ids, log-probabilities, text and end of the answer."""
    self.requests.append(request)
    stops = [stop.encode() for stop in request.stop_strings]
    tokens_1L = np.zeros((1, self._max_length), np.int32)
    tokens_1L[0, : len(request.prompt_ids)] = request.prompt_ids
    rng = np.random.default_rng(request.seed)
    ids, logprobs, text = [], [], b''
    for _ in range(request.max_tokens):
      length = len(request.prompt_ids) + len(ids)
      token_id, logprob = self._sample(tokens_1L, length, request.sampling, rng)
      tokens_1L[0, length] = token_id
      ids.append(token_id)
      logprobs.append(logprob)
      text += b''.join(self._token_bytes[token_id : token_id + 1])
      if token_id in request.stop_ids or any(stop in text for stop in stops):
        return ids, logprobs, text, 'stop'
    return ids, logprobs, text, 'length'

  def _sample(self, tokens_1L, length, sampling, rng):
    """Returns the next token and its untruncated log-probability."""
    assert (sampling.top_p, sampling.min_p) == (1, 0)
    hidden_1LD = tiny.hidden(self._policy)(self._params, tokens_1L)
    output_VD = np.asarray(self._policy.output_VD(self._params))
    logits_V = output_VD @ np.asarray(hidden_1LD)[0, length - 1]
    logprobs_V = scipy.special.log_softmax(logits_V / sampling.temperature)
    least = np.sort(logprobs_V)[-sampling.top_k] if sampling.top_k else -np.inf
    left_V = np.where(logprobs_V >= least, logprobs_V, -np.inf)
    token_id = int(np.argmax(left_V + rng.gumbel(size=left_V.shape)))
    return token_id, float(logprobs_V[token_id])


def _request(params, prompt_ids, max_tokens, seed):
  sampling = {name: params[name] for name in ('temperature', 'top_p', 'min_p')}
  return dialects.Request(
    prompt_ids=prompt_ids,
    max_tokens=max_tokens,
    sampling=sampler.Sampling(top_k=max(params['top_k'], 0), **sampling),
    seed=params[seed],
    stop_strings=params['stop'],
    stop_ids=params['stop_token_ids'],
  )
