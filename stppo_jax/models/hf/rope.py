"""Reads and writes the fields of a `config.json` about rotary positions."""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

from stppo_jax.models import config as model_config
from stppo_jax.models.hf import families
from stppo_jax.models.hf import fields as fields_lib

FULL, SLIDING = 'full_attention', 'sliding_attention'


def read(
  hf: Mapping[str, Any], family: families.Family, longest: int
) -> dict[str, Any]:
  """Returns field of `ModelConfig` -> value, for fields about rotary positions.

  Args:
    hf: the contents of the `config.json`.
    family: the model family.
    longest: the longest text of the run in tokens.

  Raises:
    ValueError: a field has a value that is not allowed or not supported.
  """
  rope, local = _rope_fields(hf, family)
  theta = rope.get('rope_theta') or hf.get('rope_theta') or 10000.0
  fields: dict[str, Any] = {'rope_theta': float(theta)}
  if rope.get('partial_rotary_factor') is not None:
    fields['partial_rotary_factor'] = rope['partial_rotary_factor']
  if family.local_rope:
    base = local.get('rope_theta')
    # If the file has `rope_theta` only in `rope_parameters`, `hf` lacks this
    # field, but `theta` has its value.
    if base is None:
      base = theta if family.local_rope == 'rope_theta' else None
    fields['local_rope_theta'] = float(base or hf[family.local_rope])
    kind = local.get('rope_type', 'default')
    if kind != 'default':
      raise ValueError(
        f'unsupported rope scaling {kind!r} of layers with a window; '
        'supported: default'
      )
  kind = rope.get('rope_type') or rope.get('type') or 'default'
  kind = 'longrope' if kind == 'su' else kind  # an old name of longrope
  if kind != 'default':
    if kind == 'yarn' and theta == 1:
      raise ValueError(f'rope_theta={theta}: must not be 1 with yarn')
    fields['rope_scaling'] = _scaling(kind, rope, hf, longest)
  return fields


def _scaling(
  kind: str, rope: Mapping[str, Any], hf: Mapping[str, Any], longest: int
) -> model_config.RopeScaling:
  """Returns the scaling of rotary positions that a file describes.

  Args:
    kind: the kind of scaling in the file.
    rope: the file's fields in `rope_parameters` or `rope_scaling`.
    hf: the contents of the file.
    longest: the longest text of the run in tokens.

  Raises:
    ValueError: `kind` is no key of `model_config.ROPE_FIELDS`, or a field is
      missing or has a value that is not allowed.
  """
  if kind not in model_config.ROPE_FIELDS:
    raise ValueError(
      f'unsupported rope scaling {kind!r}; supported: default, '
      + ', '.join(model_config.ROPE_FIELDS)
    )
  given = {name: x for name, x in rope.items() if x is not None}
  length = hf.get('max_position_embeddings')
  if outside := hf.get('original_max_position_embeddings'):
    given['original_max_position_embeddings'] = outside
  elif length:
    given.setdefault('original_max_position_embeddings', length)
  defaults = {
    field.name: field.default
    for field in dataclasses.fields(model_config.RopeScaling)
    if field.name in ('beta_fast', 'beta_slow', 'truncate')
  }
  given = defaults | given
  if kind in ('yarn', 'longrope'):
    original = fields_lib.needed(given, 'original_max_position_embeddings')
    if length:
      given.setdefault('factor', length / original)
    if 'attention_factor' not in given:
      given['attention_factor'] = _attention_factor(kind, given)
  fields = {
    name: fields_lib.needed(given, name)
    for name in model_config.ROPE_FIELDS[kind]
  }
  if kind == 'dynamic':
    fields['original_max_position_embeddings'] = fields_lib.needed(
      hf, 'max_position_embeddings'
    )
  if kind in ('dynamic', 'longrope'):
    fields['length'] = longest
  for name in ('short_factor', 'long_factor'):
    if name in fields:
      fields[name] = tuple(fields[name])
  if kind == 'llama3':
    low, high = fields['low_freq_factor'], fields['high_freq_factor']
    if low >= high:
      raise ValueError(
        f'low_freq_factor={low}: must be smaller than high_freq_factor={high}'
      )
  return model_config.RopeScaling(kind, **fields)


def _attention_factor(kind: str, rope: Mapping[str, Any]) -> float:
  """Returns the `attention_factor` that a file without this field implies."""
  factor = max(fields_lib.needed(rope, 'factor'), 1.0)
  if kind == 'longrope':
    original = rope['original_max_position_embeddings']
    if original == 1:
      raise ValueError(
        'original_max_position_embeddings=1: must be greater than 1 with '
        'longrope'
      )
    return math.sqrt(1 + math.log(factor) / math.log(original))
  scale = lambda weight: 0.1 * weight * math.log(factor) + 1.0
  one, other = rope.get('mscale'), rope.get('mscale_all_dim')
  return scale(one) / scale(other) if one and other else scale(1.0)


def _rope_fields(
  hf: Mapping[str, Any], family: families.Family
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
  """Returns the rotary fields for two kinds of layers.

  The first mapping is for layers without a window, and the second mapping is
  for layers with a window. If a file has no separate fields for layers with a
  window, the second mapping is empty.

  Files have the fields in `rope_parameters` or in `rope_scaling`. If a field is
  in both, `rope_scaling` counts, as in `transformers`.

  Raises:
    ValueError: one of the fields has a value that is not allowed.
  """
  fields: dict[str, Any] = {}
  local: Mapping[str, Any] = {}
  for name in ('rope_parameters', 'rope_scaling'):
    given = hf.get(name) or {}
    fields_lib.check(f'{name}.', given, fields_lib.ROPE)
    for kind in (FULL, SLIDING):
      fields_lib.check(
        f'{name}.{kind}.', given.get(kind) or {}, fields_lib.ROPE
      )
    local = given.get(SLIDING) or local
    fields |= given.get(FULL) or given
  fields_lib.check_supported(fields, family)
  return fields, local


def write(
  config: model_config.ModelConfig, family: families.Family
) -> dict[str, Any]:
  """Returns the fields of a `config.json` about rotary positions.

  Old and new versions of `transformers` can read the fields.
  """
  hf: dict[str, Any] = {'rope_theta': config.rope_theta}
  if scaling := config.rope_scaling:
    fields = ('rope_type', *model_config.ROPE_FIELDS[scaling.rope_type])
    hf['rope_scaling'] = {name: getattr(scaling, name) for name in fields}
    # `original_max_position_embeddings` is in `rope_scaling` already. But if a
    # file has this field outside too, `transformers` reads the value outside.
    if 'original_max_position_embeddings' in fields:
      original = scaling.original_max_position_embeddings
      hf['original_max_position_embeddings'] = original
  if config.local_rope_theta:
    # Old versions of `transformers` read the fields outside of
    # `rope_parameters`. New versions read the fields in `rope_parameters`,
    # which has one set of fields for each kind of layer.
    hf[family.local_rope] = config.local_rope_theta
    hf['rope_parameters'] = {
      FULL: {
        'rope_type': 'default',
        **hf.get('rope_scaling', {}),
        'rope_theta': config.rope_theta,
      },
      SLIDING: {
        'rope_type': 'default',
        'rope_theta': config.local_rope_theta,
      },
    }
  return hf
