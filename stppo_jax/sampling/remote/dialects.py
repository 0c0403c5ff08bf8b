"""What is said to an inference server, and how its answers are read.

Token ids go out and come in: text is never turned into ids, neither here nor
on the server. vLLM's and our own server speak the OpenAI completions API with
`return_token_ids`; SGLang has ids on its native `/generate` only. A server says
in /v1/models (`owned_by`) which one it is; `DIALECTS` holds what differs.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import math
from typing import Any

import numpy as np

from stppo_jax.sampling import sampler

_ROUNDING = 1e-3  # nats by which a log-probability may exceed 0


class BadReply(ValueError):
  """An answer to something else than was asked; asking again is of no use."""


@dataclasses.dataclass(frozen=True)
class Request:
  """One turn.

  Attributes:
    prompt_ids: the whole dialogue so far.
    max_tokens: longest turn.
    sampling: how tokens are drawn.
    seed: of the draw, in [0, 2**31).
    stop_strings: the server ends the turn with the first one completed.
    stop_ids: or with one of these tokens.
  """

  prompt_ids: Sequence[int]
  max_tokens: int
  sampling: sampler.Sampling
  seed: int
  stop_strings: Sequence[str]
  stop_ids: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Answer:
  """What the server wrote.

  Attributes:
    token_ids: int, at most `max_tokens`.
    logprobs: of each; their temperature is that of `Dialect.tempered`.
    version: label of the weights that wrote it; None where it is not told.
  """

  token_ids: list[int]
  logprobs: list[float]
  version: str | None


@dataclasses.dataclass(frozen=True)
class Dialect:
  """What differs from server to server.

  Attributes:
    path: where a turn is asked for.
    body: (model, ask) -> the request.
    read: (ask, reply) -> `Answer`; raises ValueError or `Unfaithful`.
    tempered: log-probabilities are under softmax(logits / temperature); else
      under softmax(logits). Both are before truncation.
    update_path: where weights are announced.
    update_body: (folder, label) -> the request.
    flush_path: is posted to after an update, to drop keys and values of the
      old weights; '' = the update does it.
    version_path: tells `weight_version`, the label of the weights that are
      held; '' = nothing does.
  """

  path: str
  body: Callable[[str, Request], dict[str, Any]]
  read: Callable[[Request, bytes], Answer]
  tempered: bool
  update_path: str
  update_body: Callable[[str, str], dict[str, Any]]
  flush_path: str
  version_path: str


def listed(reply: bytes) -> dict[str, Mapping[str, Any]]:
  """The entries of a /v1/models reply, by model name.

  Raises:
    ValueError: it is no such list.
  """
  entries = fields(reply).get('data')
  if not isinstance(entries, list):
    raise ValueError('the reply has no list "data"')
  return {
    entry['id']: entry
    for entry in entries
    if isinstance(entry, dict) and isinstance(entry.get('id'), str)
  }


def fields(reply: bytes) -> dict[str, Any]:
  """The JSON object of a reply.

  Raises:
    ValueError: it is none.
  """
  try:
    value = json.loads(reply)
  except (ValueError, RecursionError) as error:
    raise ValueError('the reply is not JSON') from error
  if not isinstance(value, dict):
    raise ValueError('the reply is no JSON object')
  return value


def _completion_body(model: str, ask: Request) -> dict[str, Any]:
  """See vLLM, `CompletionRequest`; what is left out there has defaults that a
  model's generation_config.json may change, so nothing is."""
  return {
    'model': model,
    'prompt': list(ask.prompt_ids),
    'max_tokens': ask.max_tokens,
    **_drawing(ask.sampling),
    'n': 1,
    'seed': ask.seed,
    'presence_penalty': 0.0,
    'frequency_penalty': 0.0,
    'repetition_penalty': 1.0,
    'stop': list(ask.stop_strings),
    'stop_token_ids': list(ask.stop_ids),
    'include_stop_str_in_output': True,
    # Of the ends that a model's files may name only ours count.
    'ignore_eos': True,
    'add_special_tokens': False,
    'skip_special_tokens': False,
    'spaces_between_special_tokens': False,
    'logprobs': 1,
    'return_token_ids': True,
  }


def _read_completion(ask: Request, reply: bytes) -> Answer:
  answer = fields(reply)
  choices = answer.get('choices')
  if not isinstance(choices, list) or len(choices) != 1:
    raise ValueError('the reply has no one choice')
  (choice,) = choices
  if not isinstance(choice, dict):
    raise ValueError('the choice is no JSON object')
  if choice.get('finish_reason') not in ('stop', 'length'):
    raise ValueError(f'finish_reason={str(choice.get("finish_reason"))[:40]!r}')
  # Per choice in vLLM, where one request may hold several prompts.
  echoed = choice.get('prompt_token_ids', answer.get('prompt_token_ids'))
  if echoed != list(ask.prompt_ids):
    raise BadReply(
      'the prompt came back without its token ids'
      if echoed is None
      else 'the prompt came back with other token ids'
    )
  block = choice.get('logprobs')
  logprobs = block.get('token_logprobs') if isinstance(block, dict) else None
  return _answer(ask, choice.get('token_ids'), logprobs, answer)


def _generate_body(model: str, ask: Request) -> dict[str, Any]:
  """See SGLang, `GenerateReqInput`; it serves one model."""
  del model
  return {
    'input_ids': list(ask.prompt_ids),
    'sampling_params': {
      'max_new_tokens': ask.max_tokens,
      **_drawing(ask.sampling),
      'n': 1,
      'sampling_seed': ask.seed,
      'presence_penalty': 0.0,
      'frequency_penalty': 0.0,
      'repetition_penalty': 1.0,
      'stop': list(ask.stop_strings),
      'stop_token_ids': list(ask.stop_ids),
      'no_stop_trim': True,
      'skip_special_tokens': False,
      'spaces_between_special_tokens': False,
    },
    'return_logprob': True,
  }


def _read_generate(ask: Request, reply: bytes) -> Answer:
  answer = fields(reply)
  told = answer.get('meta_info')
  if not isinstance(told, dict):
    raise ValueError('the reply has no "meta_info"')
  reason = told.get('finish_reason')
  kind = reason.get('type') if isinstance(reason, dict) else reason
  if kind not in ('stop', 'length'):
    raise ValueError(f'finish_reason={str(kind)[:40]!r}')
  # The ids of the prompt come with their log-probabilities only, which would
  # be computed anew in every turn; their number is free.
  if told.get('prompt_tokens') != len(ask.prompt_ids):
    raise BadReply('the prompt was read as another number of tokens')
  ids = answer.get('output_ids')
  entries = told.get('output_token_logprobs')
  if not isinstance(entries, list):
    raise BadReply('the reply has no log-probabilities')
  try:
    pairs = [(logprob, token_id) for logprob, token_id, *_ in entries]
  except (TypeError, ValueError) as error:
    raise BadReply('malformed log-probabilities') from error
  logprobs = [logprob for logprob, _ in pairs]
  if [token_id for _, token_id in pairs] != ids:
    raise BadReply('log-probabilities of other token ids')
  return _answer(ask, ids, logprobs, told)


def _drawing(sampling: sampler.Sampling) -> dict[str, Any]:
  return {
    'temperature': sampling.temperature,
    'top_k': sampling.top_k or -1,
    'top_p': sampling.top_p,
    'min_p': sampling.min_p,
  }


def _answer(
  ask: Request, ids: Any, logprobs: Any, told: dict[str, Any]
) -> Answer:
  """Checked ids and log-probabilities, both still of any type."""
  if not isinstance(ids, list) or not all(type(n) is int for n in ids):
    raise BadReply('the reply has no token ids')
  if not isinstance(logprobs, list):
    raise BadReply('the reply has no log-probabilities')
  if len(logprobs) != len(ids):
    raise BadReply(f'{len(logprobs)} log-probabilities, {len(ids)} tokens')
  if not all(_is_logprob(logprob) for logprob in logprobs):
    raise BadReply('a log-probability is no number up to 0')
  if len(ids) > ask.max_tokens:
    raise BadReply(f'{len(ids)} tokens, {ask.max_tokens} were asked for')
  version = told.get('weight_version')
  return Answer(ids, logprobs, None if version is None else str(version))


def _is_logprob(value: Any) -> bool:
  if isinstance(value, bool) or not isinstance(value, int | float):
    return False
  return math.isfinite(value) and value <= _ROUNDING


def _update_from_disk(folder: str, label: str) -> dict[str, Any]:
  return {'model_path': folder, 'weight_version': label}


def _reload_weights(folder: str, label: str) -> dict[str, Any]:
  del label
  return {'method': 'reload_weights', 'kwargs': {'weights_path': folder}}


_OURS = Dialect(
  path='/v1/completions',
  body=_completion_body,
  read=_read_completion,
  tempered=True,
  update_path='/update_weights_from_disk',
  update_body=_update_from_disk,
  flush_path='',
  version_path='/model_info',
)
DIALECTS: Mapping[str, Dialect] = {
  'stppo_jax': _OURS,
  'sglang': dataclasses.replace(
    _OURS, path='/generate', body=_generate_body, read=_read_generate
  ),
  'vllm': dataclasses.replace(
    _OURS,
    tempered=False,
    update_path='/collective_rpc',
    update_body=_reload_weights,
    # Without the flag nothing is dropped as long as any request runs.
    flush_path='/reset_prefix_cache?reset_running_requests=true',
    version_path='',
  ),
}


def seed_of(key_data: np.ndarray, position: int) -> int:
  """A function of a row's key and of the position its turn begins at."""
  entropy = [*map(int, key_data), position]
  return int(np.random.SeedSequence(entropy).generate_state(1)[0]) >> 1
