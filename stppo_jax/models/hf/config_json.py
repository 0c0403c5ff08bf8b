"""Reads and writes the shape of a model as a Hugging Face `config.json`.

The file is untrusted input, so each field is checked before it is used. An
error names the field, its value and the rule.
"""

from collections.abc import Mapping
import math
from typing import Any

from stppo_jax import settings
from stppo_jax.models import config as model_config
from stppo_jax.models.hf import families


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

_FIELDS: Mapping[str, settings.Rule] = {
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

# The values that are implemented.
_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
  'hidden_act': ('silu',),
  'attention_bias': (False,),
  'mlp_bias': (False,),
  'use_sliding_window': (False,),
  'partial_rotary_factor': (1.0,),
  'decoder_sparse_step': (1,),
  'mlp_only_layers': ([],),
  'quantization_config': (),
}


def read(hf: Mapping[str, Any], **computes: Any) -> model_config.ModelConfig:
  """Returns the shape that a `config.json` describes.

  Args:
    hf: contents of the file.
    **computes: fields of `ModelConfig` that the file does not have, such as
      `dtype` and `remat`.

  Raises:
    ValueError: the family is not in `FAMILIES`, an option of it is not
      implemented, or a key is missing or has a value that is not allowed; one
      line.
  """
  # A field that is null is read like one that is missing.
  hf = {name: value for name, value in hf.items() if value is not None}
  # Checked first, because fields have other meanings in other families.
  _check_fields('', hf, {'model_type': _TEXT})
  family = families.find(hf.get('model_type'))
  _check_fields('', hf, _FIELDS)
  _check_supported(hf)
  others = set(hf.get('layer_types', ())) - {'full_attention'}
  if others:
    raise ValueError(
      f'layer_types {", ".join(sorted(others))} are not supported; supported: '
      'full_attention'
    )
  hidden_size = _needed(hf, 'hidden_size')
  heads = _needed(hf, 'num_attention_heads')
  rope_theta, rope_scaling = _rope(hf)
  experts = {}
  if family.experts:
    experts = {
      'num_experts': _needed(hf, 'num_experts', 'num_local_experts'),
      'num_experts_per_tok': _needed(hf, 'num_experts_per_tok'),
      'moe_intermediate_size': _needed(hf, 'moe_intermediate_size'),
      'norm_topk_prob': hf.get('norm_topk_prob', False),
      'router_aux_loss_coef': hf.get('router_aux_loss_coef', 0.001),
    }
  shape = model_config.ModelConfig(
    vocab_size=_needed(hf, 'vocab_size'),
    hidden_size=hidden_size,
    intermediate_size=_needed(hf, 'intermediate_size'),
    num_layers=_needed(hf, 'num_hidden_layers'),
    num_heads=heads,
    num_kv_heads=hf.get('num_key_value_heads', heads),
    head_dim=hf.get('head_dim') or family.head_dim or hidden_size // heads,
    rope_theta=rope_theta,
    rms_norm_eps=hf.get('rms_norm_eps', 1e-6),
    qkv_bias=family.qkv_bias,
    tie_embeddings=hf.get('tie_word_embeddings', False),
    qk_norm=family.qk_norm,
    rope_scaling=rope_scaling,
    max_position_embeddings=hf.get('max_position_embeddings', 32768),
    **experts,
    **computes,
  )
  if heads % shape.num_kv_heads:
    raise ValueError(
      f'num_attention_heads={heads}: must be a multiple of '
      f'num_key_value_heads={shape.num_kv_heads}'
    )
  if shape.head_dim < 2 or shape.head_dim % 2:
    raise ValueError(
      f'head_dim={shape.head_dim}: must be even and greater than 0'
    )
  if shape.num_experts_per_tok > shape.num_experts:
    raise ValueError(
      f'num_experts_per_tok={shape.num_experts_per_tok}: must be at most '
      f'num_experts={shape.num_experts}'
    )
  return shape


def write(config: model_config.ModelConfig) -> dict[str, Any]:
  """Returns the contents of a `config.json` that `transformers` loads.

  Rotary positions are written in a form that its old and new versions read.

  Raises:
    ValueError: the model is of no family.
  """
  kind = families.kind(config)
  hf = {
    'architectures': [families.FAMILIES[kind].class_name],
    'model_type': kind,
    'vocab_size': config.vocab_size,
    'hidden_size': config.hidden_size,
    'intermediate_size': config.intermediate_size,
    'num_hidden_layers': config.num_layers,
    'num_attention_heads': config.num_heads,
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_dim,
    'rope_theta': config.rope_theta,
    'rms_norm_eps': config.rms_norm_eps,
    'tie_word_embeddings': config.tie_embeddings,
    'hidden_act': 'silu',
    'max_position_embeddings': config.max_position_embeddings,
    'torch_dtype': 'float32',
  }
  if scaling := config.rope_scaling:
    fields = ('rope_type', *model_config.ROPE_FIELDS[scaling.rope_type])
    hf['rope_scaling'] = {name: getattr(scaling, name) for name in fields}
  if config.num_experts:
    hf |= {
      'num_experts': config.num_experts,
      'num_experts_per_tok': config.num_experts_per_tok,
      'moe_intermediate_size': config.moe_intermediate_size,
      'norm_topk_prob': config.norm_topk_prob,
      'router_aux_loss_coef': config.router_aux_loss_coef,
      'decoder_sparse_step': 1,
      'mlp_only_layers': [],
    }
  return hf


def _needed(hf: Mapping[str, Any], *names: str) -> Any:
  """Returns the first value that is given under one of the names.

  Raises:
    ValueError: no name has a value.
  """
  for name in names:
    if name in hf:
      return hf[name]
  raise ValueError(f'lacks {" or ".join(names)}')


def _rope(
  hf: Mapping[str, Any],
) -> tuple[float, model_config.RopeScaling | None]:
  """Returns the base and the scaling of rotary positions."""
  rope = _rope_fields(hf)
  theta = rope.get('rope_theta') or hf.get('rope_theta') or 10000.0
  kind = rope.get('rope_type') or rope.get('type') or 'default'
  if kind == 'default':
    return float(theta), None
  if kind not in model_config.ROPE_FIELDS:
    raise ValueError(
      f'unsupported rope scaling {kind!r}; supported: default, '
      + ', '.join(model_config.ROPE_FIELDS)
    )
  given = {name: x for name, x in rope.items() if x is not None}
  if length := hf.get('max_position_embeddings'):
    given.setdefault('original_max_position_embeddings', length)
  fields = {
    name: _needed(given, name) for name in model_config.ROPE_FIELDS[kind]
  }
  if kind == 'llama3':
    low, high = fields['low_freq_factor'], fields['high_freq_factor']
    if low >= high:
      raise ValueError(
        f'low_freq_factor={low}: must be smaller than high_freq_factor={high}'
      )
  return float(theta), model_config.RopeScaling(kind, **fields)


def _rope_fields(hf: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns the fields of rotary positions, from either way to write them.

  Raises:
    ValueError: one of the fields has a value that is not allowed.
  """
  name = 'rope_scaling' if hf.get('rope_scaling') else 'rope_parameters'
  fields = hf.get(name, {})
  _check_fields(f'{name}.', fields, _ROPE)
  if fields.get('full_attention') is not None:
    fields = fields['full_attention']
    _check_fields(f'{name}.full_attention.', fields, _ROPE)
  _check_supported(fields)
  return fields


def _check_supported(fields: Mapping[str, Any]) -> None:
  """Raises ValueError for an option that is not implemented; one line."""
  for name, values in _SUPPORTED.items():
    value = fields.get(name)
    if value is not None and value not in values:
      raise ValueError(
        f'{name}={value!r} is not supported; supported: '
        + (', '.join(map(repr, values)) or 'none')
      )


def _check_fields(
  prefix: str, fields: Mapping[str, Any], rules: Mapping[str, settings.Rule]
) -> None:
  """Raises ValueError for a value that breaks its rule; one line."""
  for name, rule in rules.items():
    value = fields.get(name)
    if value is not None and not rule.holds(value):
      raise ValueError(f'{prefix}{name}={value!r}: must be {rule.allowed}')
