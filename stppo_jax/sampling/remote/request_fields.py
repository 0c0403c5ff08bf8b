"""The fields of a completion request, checked one by one."""

from collections.abc import Mapping
import dataclasses
import json
import math
from typing import Any

_MAX_STOPS = 16

# The server supports no other values of these fields. A request may leave them
# out.
_FIXED = {
  'n': 1,
  'stream': False,
  'echo': False,
  'presence_penalty': 0.0,
  'frequency_penalty': 0.0,
  'repetition_penalty': 1.0,
  'include_stop_str_in_output': True,
  'ignore_eos': True,
  'add_special_tokens': False,
  'skip_special_tokens': False,
  'spaces_between_special_tokens': False,
  'logprobs': 1,
  'return_token_ids': True,
}


@dataclasses.dataclass(frozen=True)
class Completion:
  """The fields that a request may set, named as in the completions API.

  Attributes:
    model: the name of the model.
    prompt: token ids.
    max_tokens: the most tokens of the completion.
    temperature: the temperature; 0 = greedy.
    top_k, top_p, min_p: the truncation, see `sampler.Sampling`.
    seed: the seed of the draws.
    stop: the first of these strings to be complete ends the completion.
    stop_token_ids: the first of these tokens ends it, too.
  """

  model: str
  prompt: list
  max_tokens: int = 16
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  seed: int = 0
  stop: list = dataclasses.field(default_factory=list)
  stop_token_ids: list = dataclasses.field(default_factory=list)


def parse(
  body: Mapping[str, Any], *, model: str, vocab_size: int, max_length: int
) -> Completion:
  """Returns the fields of a completion request, checked.

  Args:
    body: the JSON object of POST /v1/completions.
    model: the name of the model that is served.
    vocab_size: the number of the model's vocabulary entries.
    max_length: the most tokens of a dialogue.

  Raises:
    LookupError: if the request is for another model.
    ValueError: if a field cannot be served; the message is one line.
  """
  kinds: dict[str, Any] = {
    field.name: field.type for field in dataclasses.fields(Completion)
  }
  for name, value in body.items():
    if name in _FIXED and value != _FIXED[name]:
      raise ValueError(f'{name}: only {json.dumps(_FIXED[name])} is served')
    if name not in _FIXED and name not in kinds:
      raise ValueError(f'unknown field {name[:40]!r}')
  known = {name: value for name, value in body.items() if name in kinds}
  completion = Completion(**{'model': None, 'prompt': None, **known})
  for name, kind in kinds.items():
    if not _is(getattr(completion, name), kind):
      raise ValueError(f'{name}: expected {kind.__name__}')
  if completion.model != model:
    raise LookupError(f'no model {completion.model[:80]!r}')
  for name in ('prompt', 'stop_token_ids'):
    ids = getattr(completion, name)
    if not all(type(n) is int and 0 <= n < vocab_size for n in ids):
      raise ValueError(f'{name}: expected ids in [0, {vocab_size})')
  stops = completion.stop
  if len(stops) > _MAX_STOPS or not all(
    isinstance(s, str) and s for s in stops
  ):
    raise ValueError(f'stop: expected up to {_MAX_STOPS} strings')
  if not completion.prompt or completion.max_tokens < 1:
    raise ValueError('prompt, max_tokens: at least one token each')
  length = len(completion.prompt) + completion.max_tokens
  if length > max_length:
    raise ValueError(f'{length} tokens, {max_length} fit')
  if not (0 < completion.top_p <= 1 and 0 <= completion.min_p <= 1):
    raise ValueError('top_p, min_p: expected fractions')
  return completion


def _is(value: Any, kind: Any) -> bool:
  if isinstance(value, bool):
    return False
  if kind is float:
    return isinstance(value, int | float) and math.isfinite(value)
  return isinstance(value, kind)
