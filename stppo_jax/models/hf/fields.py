"""Checks the fields of a Hugging Face `config.json`.

The file is untrusted input, so each field is checked before it is used. An
error names the field, its value and the rule.
"""

from collections.abc import Mapping
import sys
from typing import Any

from stppo_jax import settings
from stppo_jax.models.hf import families


def _number(x: Any) -> bool:
  # An integer in a file may be larger than the largest float.
  return type(x) in (int, float) and abs(x) <= sys.float_info.max


_BOOL = settings.Rule(lambda x: type(x) is bool, 'true or false')
_COUNT = settings.Rule(
  lambda x: type(x) is int and x > 0, 'an integer greater than 0'
)
_WHOLE = settings.Rule(
  lambda x: type(x) is int and x >= 0, 'an integer, 0 or greater'
)
_NOT_NEGATIVE = settings.Rule(
  lambda x: _number(x) and x >= 0, 'a number, 0 or greater'
)
_NUMBERS = settings.Rule(
  lambda x: isinstance(x, list) and all(_number(y) and y > 0 for y in x),
  'a list of numbers greater than 0',
)
_OBJECT = settings.Rule(lambda x: isinstance(x, Mapping), 'an object')
_POSITIVE = settings.Rule(
  lambda x: _number(x) and x > 0, 'a number greater than 0'
)
_SHARE = settings.Rule(
  lambda x: _number(x) and 0 < x <= 1, 'above 0, at most 1'
)
TEXT = settings.Rule(lambda x: isinstance(x, str), 'a string')
_TEXTS = settings.Rule(
  lambda x: isinstance(x, list) and all(isinstance(y, str) for y in x),
  'a list of strings',
)

FIELDS: Mapping[str, settings.Rule] = {
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
  'decoder_sparse_step': _COUNT,
  'mlp_only_layers': settings.Rule(
    lambda x: isinstance(x, list) and all(map(_WHOLE.holds, x)),
    'a list of integers, 0 or greater',
  ),
  'layer_types': _TEXTS,
  'sliding_window': _COUNT,
  'use_sliding_window': _BOOL,
  'max_window_layers': _WHOLE,
  'sliding_window_pattern': _COUNT,
  'attention_bias': _BOOL,
  'mlp_bias': _BOOL,
  'query_pre_attn_scalar': _POSITIVE,
  'partial_rotary_factor': _SHARE,
  'rope_local_base_freq': _POSITIVE,
  'original_max_position_embeddings': _COUNT,
  'rope_theta': _POSITIVE,
  'rope_scaling': _OBJECT,
  'rope_parameters': _OBJECT,
  'max_position_embeddings': _COUNT,
  'norm_topk_prob': _BOOL,
  'rms_norm_eps': _POSITIVE,
  'router_aux_loss_coef': _NOT_NEGATIVE,
  'tie_word_embeddings': _BOOL,
}
ROPE: Mapping[str, settings.Rule] = {
  'rope_type': TEXT,
  'type': TEXT,
  'rope_theta': _POSITIVE,
  'factor': _POSITIVE,
  'low_freq_factor': _POSITIVE,
  'high_freq_factor': _POSITIVE,
  'original_max_position_embeddings': _COUNT,
  'attention_factor': _POSITIVE,
  'beta_fast': _POSITIVE,
  'beta_slow': _POSITIVE,
  'mscale': _NOT_NEGATIVE,
  'mscale_all_dim': _NOT_NEGATIVE,
  'truncate': _BOOL,
  'short_factor': _NUMBERS,
  'long_factor': _NUMBERS,
  'partial_rotary_factor': _SHARE,
  # In some files, these two objects contain the other fields: the first object
  # for layers without a window, and the second for layers with a window.
  'full_attention': _OBJECT,
  'sliding_attention': _OBJECT,
}

# Field -> the supported values. A field that is an option of a model's family
# may have other values.
_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
  'attention_bias': (False,),
  'mlp_bias': (False,),
  'use_sliding_window': (False,),
  'partial_rotary_factor': (1.0,),
  'final_logit_softcapping': (),
  'attn_logit_softcapping': (),
  'use_bidirectional_attention': (False,),
  'quantization_config': (),
}


def needed(hf: Mapping[str, Any], *names: str) -> Any:
  """Returns the value of the first of the named fields that `hf` has.

  Raises:
    ValueError: `hf` has none of these fields.
  """
  for name in names:
    if name in hf:
      return hf[name]
  raise ValueError(f'lacks {" or ".join(names)}')


def check_supported(fields: Mapping[str, Any], family: families.Family) -> None:
  """Raises ValueError if a field has a value that is not implemented.

  The message is one line.
  """
  options = {*family.options, family.windows.switch if family.windows else ''}
  supported = {
    name: values for name, values in _SUPPORTED.items() if name not in options
  } | {name: (value,) for name, value in family.fixed.items()}
  for name, values in supported.items():
    value = fields.get(name)
    if value is not None and value not in values:
      raise ValueError(
        f'{name}={value!r} is not supported; supported: '
        + (', '.join(map(repr, values)) or 'none')
      )


def check(
  prefix: str, fields: Mapping[str, Any], rules: Mapping[str, settings.Rule]
) -> None:
  """Raises ValueError if the value of a field breaks the rule of the field.

  The message is one line.

  Args:
    prefix: the text before the name of a field in the message.
    fields: the fields of the file. A null is like a missing field.
    rules: name of a field -> its rule.
  """
  for name, rule in rules.items():
    value = fields.get(name)
    if value is not None and not rule.holds(value):
      raise ValueError(f'{prefix}{name}={value!r}: must be {rule.allowed}')
