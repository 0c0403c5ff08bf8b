"""Writes the requests to inference servers, and reads their replies.

Requests and replies contain token ids: neither this package nor the server
turns text into ids. vLLM implements the OpenAI completions API with
`return_token_ids`. SGLang accepts and returns ids only on its native
`/generate`. The field `owned_by` of /v1/models names the kind of server, and
`DIALECTS` describes how the kinds differ.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import sys
from typing import Any

import numpy as np

from stppo_jax.sampling import sampler

# The most nats by which a log-probability may exceed 0 because of rounding.
_ROUNDING = 1e-3


class BadReply(ValueError):
  """Raised if a reply shows that the server cannot do what was requested.

  Another attempt would get the same reply.
  """


@dataclasses.dataclass(frozen=True)
class Request:
  """Describes a request for one turn.

  Attributes:
    prompt_ids: the token ids of the dialogue so far.
    max_tokens: the most tokens of the turn.
    sampling: temperature and truncation.
    seed: the seed of the random draws, in [0, 2**31).
    stop_strings: strings at which the server ends the turn, as soon as one of
      them is complete.
    stop_ids: token ids after which the server ends the turn, too.
  """

  prompt_ids: Sequence[int]
  max_tokens: int
  sampling: sampler.Sampling
  seed: int
  stop_strings: Sequence[str]
  stop_ids: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Answer:
  """Describes the turn that the server wrote.

  Attributes:
    token_ids: at most `max_tokens` ids.
    logprobs: the log-probability of each token, see `Dialect.tempered`.
    version: the label of the weights that wrote the turn; None if the server
      does not report it.
  """

  token_ids: list[int]
  logprobs: list[float]
  version: str | None


@dataclasses.dataclass(frozen=True)
class Dialect:
  """Describes the parts of the protocol that depend on the kind of server.

  Attributes:
    path: the path to which requests for turns are posted.
    body: takes the model's name and a request, and returns the JSON values to
      post.
    read: takes a request and the reply to it, and returns an `Answer`; raises
      ValueError or `BadReply`.
    tempered: whether log-probabilities are under softmax(logits / temperature)
      instead of softmax(logits). In both cases they are before truncation.
    update_path: the path to which requests to load weights are posted.
    update_body: takes the folder and the label of weights, and returns the JSON
      values to post to `update_path`.
    flush_path: the path that is posted to after an update, so that the server
      drops the keys and values of the old weights; '' if the update itself
      drops them.
    version_path: the path whose reply has `weight_version`, the label of the
      weights that the server holds; '' if the server does not report it.
  """

  path: str
  body: Callable[[str, Request], dict[str, Any]]
  read: Callable[[Request, bytes], Answer]
  tempered: bool
  update_path: str
  update_body: Callable[[str, str], dict[str, Any]]
  flush_path: str
  version_path: str


def read_models(reply: bytes) -> dict[str, Mapping[str, Any]]:
  """Returns the description of each model in a /v1/models reply, by name.

  Raises:
    ValueError: if the reply has no list of models.
  """
  entries = _fields(reply).get('data')
  if not isinstance(entries, list):
    raise ValueError('the reply has no list "data"')
  return {
    entry['id']: entry
    for entry in entries
    if isinstance(entry, dict) and isinstance(entry.get('id'), str)
  }


def read_version(reply: bytes) -> str | None:
  """Returns the label of weights that a reply names, or None if it names none.

  Raises:
    ValueError: if the reply is not a JSON object.
  """
  return _label(_fields(reply))


def check_success(reply: bytes) -> None:
  """Raises ValueError if the reply says that an update failed."""
  if reply and _fields(reply).get('success') is False:
    raise ValueError(
      f'the server refused the update: {reply[:200].decode("utf-8", "replace")}'
    )


def seed_of(key_data: np.ndarray, position: int) -> int:
  """Returns the seed of a turn, in [0, 2**31).

  Args:
    key_data: the integers of the row's key.
    position: the number of tokens before the turn.
  """
  # The last bit is dropped, because servers read seeds as signed integers.
  entropy = [*map(int, key_data), position]
  return int(np.random.SeedSequence(entropy).generate_state(1)[0]) >> 1


def _fields(reply: bytes) -> dict[str, Any]:
  try:
    value = json.loads(reply)
  except (ValueError, RecursionError) as error:
    raise ValueError('the reply is not JSON') from error
  if not isinstance(value, dict):
    raise ValueError('the reply is not a JSON object')
  return value


def _label(fields: dict[str, Any]) -> str | None:
  version = fields.get('weight_version')
  return None if version is None else str(version)


# Fields that are the same in every request to vLLM and SGLang. They are all
# listed, because the generation_config.json of the model may change the
# defaults.
_PLAIN: Mapping[str, Any] = {
  'n': 1,
  'presence_penalty': 0.0,
  'frequency_penalty': 0.0,
  'repetition_penalty': 1.0,
  'skip_special_tokens': False,
  'spaces_between_special_tokens': False,
}
# Fields that are the same in every request to the completions API.
_COMPLETION: Mapping[str, Any] = {
  **_PLAIN,
  'include_stop_str_in_output': True,
  # The server must not end a turn at an end token that only the files of the
  # model name: the automaton that decides where a turn ends does not know this
  # token. The automaton knows only `stop_ids`.
  'ignore_eos': True,
  'add_special_tokens': False,
  'logprobs': 1,
  'return_token_ids': True,
}


def _completion_body(model: str, request: Request) -> dict[str, Any]:
  """Returns the JSON values of a `CompletionRequest` of vLLM."""
  return {
    'model': model,
    'prompt': list(request.prompt_ids),
    'max_tokens': request.max_tokens,
    'seed': request.seed,
    **_sampling_fields(request),
    **_COMPLETION,
  }


def _read_completion(request: Request, reply: bytes) -> Answer:
  fields = _fields(reply)
  match fields.get('choices'):
    case [dict(choice)]:
      reason = choice.get('finish_reason')
    case _:
      raise ValueError('expected exactly one choice in the reply')
  if reason not in ('stop', 'length'):
    raise ValueError(
      f"finish_reason={str(reason)[:40]!r}: expected 'stop' or 'length'"
    )
  # vLLM puts the prompt's ids into each choice and not beside the choices,
  # because a request to vLLM may have several prompts.
  echoed = choice.get('prompt_token_ids', fields.get('prompt_token_ids'))
  if echoed != list(request.prompt_ids):
    raise BadReply(
      'the prompt came back without its token ids'
      if echoed is None
      else 'the prompt came back with other token ids'
    )
  logprobs = choice.get('logprobs')
  if isinstance(logprobs, dict):
    logprobs = logprobs.get('token_logprobs')
  return _answer(request, choice.get('token_ids'), logprobs, fields)


def _generate_body(model: str, request: Request) -> dict[str, Any]:
  """Returns the JSON values of a `GenerateReqInput` of SGLang."""
  del model
  return {
    'input_ids': list(request.prompt_ids),
    'sampling_params': {
      'max_new_tokens': request.max_tokens,
      'sampling_seed': request.seed,
      **_sampling_fields(request),
      **_PLAIN,
      'no_stop_trim': True,
    },
    'return_logprob': True,
  }


def _read_generate(request: Request, reply: bytes) -> Answer:
  fields = _fields(reply)
  meta = fields.get('meta_info')
  if not isinstance(meta, dict):
    raise ValueError('the reply has no "meta_info"')
  reason = meta.get('finish_reason')
  kind = reason.get('type') if isinstance(reason, dict) else reason
  if kind not in ('stop', 'length'):
    raise ValueError(
      f"finish_reason={str(kind)[:40]!r}: expected 'stop' or 'length'"
    )
  # Only the number of prompt tokens is compared. The server sends the ids of
  # prompt tokens only with their log-probabilities, which it would have to
  # compute again in every turn.
  if meta.get('prompt_tokens') != len(request.prompt_ids):
    raise BadReply('the server read the prompt as another number of tokens')
  ids = fields.get('output_ids')
  entries = meta.get('output_token_logprobs')
  if not isinstance(entries, list):
    raise BadReply('the reply has no log-probabilities')
  try:
    pairs = [(logprob, token_id) for logprob, token_id, *_ in entries]
  except (TypeError, ValueError) as error:
    raise BadReply('the reply has malformed log-probabilities') from error
  logprobs = [logprob for logprob, _ in pairs]
  if [token_id for _, token_id in pairs] != ids:
    raise BadReply('the log-probabilities belong to other token ids')
  return _answer(request, ids, logprobs, meta)


def _sampling_fields(request: Request) -> dict[str, Any]:
  return {
    'temperature': request.sampling.temperature,
    'top_k': request.sampling.top_k or -1,
    'top_p': request.sampling.top_p,
    'min_p': request.sampling.min_p,
    'stop': list(request.stop_strings),
    'stop_token_ids': list(request.stop_ids),
  }


def _answer(
  request: Request, ids: Any, logprobs: Any, meta: dict[str, Any]
) -> Answer:
  """Returns an answer after a check of its ids and log-probabilities.

  Raises:
    BadReply: if the ids or the log-probabilities have a wrong type, length or
      value.
  """
  if not isinstance(ids, list) or not all(type(n) is int for n in ids):
    raise BadReply('the reply has no token ids')
  if not isinstance(logprobs, list):
    raise BadReply('the reply has no log-probabilities')
  if len(logprobs) != len(ids):
    raise BadReply(f'{len(ids)} tokens have {len(logprobs)} log-probabilities')
  if not all(_is_logprob(logprob) for logprob in logprobs):
    raise BadReply('a log-probability is not a number of at most 0')
  if len(ids) > request.max_tokens:
    raise BadReply(f'{len(ids)} tokens, but max_tokens={request.max_tokens}')
  return Answer(ids, logprobs, _label(meta))


def _is_logprob(value: Any) -> bool:
  if isinstance(value, bool) or not isinstance(value, int | float):
    return False
  # The value is compared without a conversion to float, which raises
  # OverflowError for the long integers that JSON allows.
  return -sys.float_info.max <= value <= _ROUNDING


DIALECTS: Mapping[str, Dialect] = {
  'sglang': Dialect(
    path='/generate',
    body=_generate_body,
    read=_read_generate,
    tempered=True,
    update_path='/update_weights_from_disk',
    update_body=lambda folder, label: {
      'model_path': folder,
      'weight_version': label,
    },
    flush_path='',
    version_path='/model_info',
  ),
  'vllm': Dialect(
    path='/v1/completions',
    body=_completion_body,
    read=_read_completion,
    tempered=False,
    update_path='/collective_rpc',
    update_body=lambda folder, _: {
      'method': 'reload_weights',
      'kwargs': {'weights_path': folder},
    },
    # Without `reset_running_requests`, the server keeps its whole prefix cache
    # while any request is running.
    flush_path='/reset_prefix_cache?reset_running_requests=true',
    version_path='',
  ),
}
