"""Checks the fields of a Hugging Face `config.json`.

The file is untrusted input, so each field is checked before it is used. An
error names the field, its value and the rule.
"""

from collections.abc import Mapping
import math
from typing import Any

from stppo_jax import settings


def _number(x: Any) -> bool:
  return type(x) in (int, float) and math.isfinite(x)


_BOOL = settings.Rule(lambda x: type(x) is bool, 'true or false')
_COUNT = settings.Rule(
  lambda x: type(x) is int and x > 0, 'an integer greater than 0'
)
_NOT_NEGATIVE = settings.Rule(
  lambda x: _number(x) and x >= 0, 'a number, 0 or greater'
)
_OBJECT = settings.Rule(lambda x: isinstance(x, Mapping), 'an object')
_POSITIVE = settings.Rule(
  lambda x: _number(x) and x > 0, 'a number greater than 0'
)
_TEXT = settings.Rule(lambda x: isinstance(x, str), 'a string')
_TEXTS = settings.Rule(
  lambda x: isinstance(x, list) and all(isinstance(y, str) for y in x),
  'a list of strings',
)

# Fields where null means that there is no value. Then the value follows from
# other fields, or `needed` raises an error of its own.
_OR_NULL: Mapping[str, settings.Rule] = {
  'vocab_size': _COUNT,
  'hidden_size': _COUNT,
  'intermediate_size': _COUNT,
  'num_hidden_layers': _COUNT,
  'num_attention_heads': _COUNT,
  'num_key_value_heads': _COUNT,
  'head_dim': _COUNT,
  'num_experts': _COUNT,
  'num_local_experts': _COUNT,
  'num_experts_per_tok': _COUNT,
  'moe_intermediate_size': _COUNT,
  'layer_types': _TEXTS,
  'rope_theta': _POSITIVE,
  'rope_scaling': _OBJECT,
  'rope_parameters': _OBJECT,
}
_NEVER_NULL: Mapping[str, settings.Rule] = {
  'max_position_embeddings': _COUNT,
  'norm_topk_prob': _BOOL,
  'rms_norm_eps': _POSITIVE,
  'router_aux_loss_coef': _NOT_NEGATIVE,
  'tie_word_embeddings': _BOOL,
}
_ROPE: Mapping[str, settings.Rule] = {
  'rope_type': _TEXT,
  'type': _TEXT,
  'rope_theta': _POSITIVE,
  'factor': _POSITIVE,
  'low_freq_factor': _POSITIVE,
  'high_freq_factor': _POSITIVE,
  'original_max_position_embeddings': _COUNT,
  'full_attention': _OBJECT,  # in files that list fields by kind of layer
}

# The values that are implemented; null and a missing field always pass.
_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
  'hidden_act': ('silu',),
  'attention_bias': (False,),
  'mlp_bias': (False,),
  'use_sliding_window': (False,),
  'partial_rotary_factor': (1.0,),
  'decoder_sparse_step': (1,),
  'mlp_only_layers': ([],),
  'quantization_config': (None,),
}


def check(hf: Mapping[str, Any]) -> None:
  """Raises ValueError, one line, for a field that is wrong or unsupported."""
  for name, rule in _OR_NULL.items():
    if hf.get(name) is not None:
      _check_field(name, hf[name], rule)
  for name, rule in _NEVER_NULL.items():
    if name in hf:
      _check_field(name, hf[name], rule)
  _check_supported(hf)
  others = set(hf.get('layer_types') or ()) - {'full_attention'}
  if others:
    raise ValueError(
      f'layer_types {", ".join(sorted(others))} are not supported; supported: '
      'full_attention'
    )


def model_type(hf: Mapping[str, Any]) -> str | None:
  """Returns the field `model_type`, None if it is missing.

  Raises:
    ValueError: it is not a string.
  """
  kind = hf.get('model_type')
  if kind is not None:
    _check_field('model_type', kind, _TEXT)
  return kind


def needed(hf: Mapping[str, Any], *names: str) -> Any:
  """Returns the first value that is given under one of the names.

  Raises:
    ValueError: no name has a value.
  """
  for name in names:
    if hf.get(name) is not None:
      return hf[name]
  raise ValueError(f'lacks {" or ".join(names)}')


def rope(hf: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns the fields of rotary positions, from either way to write them.

  Args:
    hf: contents of a `config.json` that passed `check`.

  Raises:
    ValueError: one of the fields has a value that is not allowed.
  """
  for name in ('rope_scaling', 'rope_parameters'):
    if hf.get(name):
      break
  else:
    return {}
  fields = _checked_rope(name, hf[name])
  if fields.get('full_attention') is not None:
    fields = _checked_rope(f'{name}.full_attention', fields['full_attention'])
  return fields


def _checked_rope(prefix: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns the fields if they are allowed, and raises ValueError otherwise."""
  for name, rule in _ROPE.items():
    if fields.get(name) is not None:
      _check_field(f'{prefix}.{name}', fields[name], rule)
  _check_supported(fields)
  return fields


def _check_supported(fields: Mapping[str, Any]) -> None:
  for name, values in _SUPPORTED.items():
    value = fields.get(name)
    if value is not None and value not in values:
      raise ValueError(
        f'{name}={value!r} is not supported; supported: '
        + ', '.join(map(repr, values))
      )


def _check_field(name: str, value: Any, rule: settings.Rule) -> None:
  if not rule.holds(value):
    raise ValueError(f'{name}={value!r}: must be {rule.allowed}')
