"""What `completions_server.py` is asked: the fields, checked one by one."""

from collections.abc import Mapping
import json
import math
from typing import Any

_MAX_STOPS = 16

# All that this server can do is what these ask for; they may be left out.
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
_KINDS = {
  'model': str,
  'prompt': list,
  'max_tokens': int,
  'temperature': float,
  'top_k': int,
  'top_p': float,
  'min_p': float,
  'seed': int,
  'stop': list,
  'stop_token_ids': list,
}
_UNSAID = {
  'max_tokens': 16,
  'temperature': 1.0,
  'top_k': 0,
  'top_p': 1.0,
  'min_p': 0.0,
  'seed': 0,
  'stop': [],
  'stop_token_ids': [],
}


def parse(
  body: Mapping[str, Any], *, model: str, vocab_size: int, max_length: int
) -> dict[str, Any]:
  """The fields of `_KINDS`, none of them missing.

  Args:
    body: of POST /v1/completions.
    model: name of the one that is served.
    vocab_size: of it.
    max_length: tokens a dialogue can hold.

  Raises:
    LookupError: another model.
    ValueError: whatever else cannot be served; one line.
  """
  for name, value in body.items():
    if name in _FIXED and value != _FIXED[name]:
      raise ValueError(f'{name}: only {json.dumps(_FIXED[name])} is served')
    if name not in _FIXED and name not in _KINDS:
      raise ValueError(f'unknown field {name[:40]!r}')
  asked = _UNSAID | {n: v for n, v in body.items() if n in _KINDS}
  for name, kind in _KINDS.items():
    if not _is(asked.get(name), kind):
      raise ValueError(f'{name}: expected {kind.__name__}')
  if asked['model'] != model:
    raise LookupError(f'no model {asked["model"][:80]!r}')
  for name in ('prompt', 'stop_token_ids'):
    if not all(type(n) is int and 0 <= n < vocab_size for n in asked[name]):
      raise ValueError(f'{name}: expected ids in [0, {vocab_size})')
  stops = asked['stop']
  if len(stops) > _MAX_STOPS or not all(
    isinstance(s, str) and s for s in stops
  ):
    raise ValueError(f'stop: expected up to {_MAX_STOPS} strings')
  if not asked['prompt'] or asked['max_tokens'] < 1:
    raise ValueError('prompt, max_tokens: at least one token each')
  length = len(asked['prompt']) + asked['max_tokens']
  if length > max_length:
    raise ValueError(f'{length} tokens, {max_length} fit')
  if not (0 < asked['top_p'] <= 1 and 0 <= asked['min_p'] <= 1):
    raise ValueError('top_p, min_p: expected fractions')
  return asked


def _is(value: Any, kind: type) -> bool:
  if isinstance(value, bool):
    return False
  if kind is float:
    return isinstance(value, int | float) and math.isfinite(value)
  return isinstance(value, kind)
