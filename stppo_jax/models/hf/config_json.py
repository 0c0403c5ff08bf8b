"""Converts between `ModelConfig` and a Hugging Face `config.json`."""

from collections.abc import Mapping, Sequence
from typing import Any

from stppo_jax.models import config as model_config
from stppo_jax.models.hf import families
from stppo_jax.models.hf import fields as fields_lib
from stppo_jax.models.hf import rope as rope_lib


def read(
  hf: Mapping[str, Any], *, longest: int = 0, **computes: Any
) -> model_config.ModelConfig:
  """Returns the `ModelConfig` that a `config.json` describes.

  Args:
    hf: contents of the file.
    longest: the longest text of the run in tokens, see
      `model_config.RopeScaling.length`.
    **computes: fields of `ModelConfig` that the file does not have, such as
      `dtype` and `remat`.

  Raises:
    ValueError: the model family is not in `families.FAMILIES`, the file uses an
      option that is not implemented, or a key is missing or has a value that is
      not allowed. The message is one line.
  """
  # The family is checked first, because it decides what other fields mean.
  fields_lib.check('', hf, {'model_type': fields_lib.TEXT})
  family = families.find(hf.get('model_type'))
  # A null in the file replaces the family's default. The field is then read
  # as if the file lacked it and the family had no default for it.
  hf = {**family.defaults, **hf}
  hf = {name: value for name, value in hf.items() if value is not None}
  fields_lib.check('', hf, fields_lib.FIELDS)
  fields_lib.check_supported(hf, family)
  hidden_size = fields_lib.needed(hf, 'hidden_size')
  heads = fields_lib.needed(hf, 'num_attention_heads')
  head_dim = hf.get('head_dim', hidden_size // heads)
  windows = _windows(hf, family.windows)
  rope = rope_lib.read(hf, family, longest)
  dense_layers = ()
  if family.experts:
    hf['num_experts'] = fields_lib.needed(
      hf, 'num_experts', 'num_local_experts'
    )
    for name in families.NEEDED:
      fields_lib.needed(hf, name)
    dense_layers = _dense_layers(hf)
  shape = model_config.ModelConfig(
    vocab_size=fields_lib.needed(hf, 'vocab_size'),
    hidden_size=hidden_size,
    intermediate_size=fields_lib.needed(hf, 'intermediate_size'),
    num_layers=fields_lib.needed(hf, 'num_hidden_layers'),
    num_heads=heads,
    num_kv_heads=hf.get('num_key_value_heads', heads),
    head_dim=head_dim,
    rms_norm_eps=hf.get('rms_norm_eps', 1e-6),
    tie_embeddings=hf.get('tie_word_embeddings', False),
    family=hf['model_type'],
    windows=windows,
    dense_layers=dense_layers,
    max_position_embeddings=hf.get('max_position_embeddings', 32768),
    **{
      'qkv_bias': False,
      **family.blocks,
      **{
        ours: hf[name]
        for name, taking in family.options.items()
        for ours in taking
        if name in hf
      },
      **rope,
    },
    **computes,
  )
  if heads % shape.num_kv_heads:
    raise ValueError(
      f'num_attention_heads={heads}: must be a multiple of '
      f'num_key_value_heads={shape.num_kv_heads}'
    )
  if head_dim < 2 or head_dim % 2:
    raise ValueError(f'head_dim={head_dim}: must be even and greater than 0')
  rotated = int(head_dim * shape.partial_rotary_factor)
  if rotated < 2 or rotated % 2:
    raise ValueError(
      f'partial_rotary_factor={shape.partial_rotary_factor}: must rotate an '
      f'even number of numbers of a head, at least 2, with head_dim={head_dim}'
    )
  if scaling := shape.rope_scaling:
    for name in ('short_factor', 'long_factor'):
      factors = getattr(scaling, name)
      if scaling.rope_type == 'longrope' and len(factors) != rotated // 2:
        raise ValueError(
          f'{name} has {len(factors)} numbers: must have {rotated // 2}, one '
          'for each pair that is rotated'
        )
    if scaling.rope_type == 'dynamic' and rotated < 4:
      raise ValueError(
        f'rope scaling dynamic: must rotate 4 numbers of a head or more, not '
        f'{rotated}'
      )
  if shape.num_experts_per_tok > shape.num_experts:
    raise ValueError(
      f'num_experts_per_tok={shape.num_experts_per_tok}: must be at most '
      f'num_experts={shape.num_experts}'
    )
  return shape


def write(config: model_config.ModelConfig) -> dict[str, Any]:
  """Returns the contents of the `config.json` of a model, for `transformers`.

  Raises:
    ValueError: the config names no model family, and `families.of` finds none.
  """
  kind = families.kind(config)
  family = families.FAMILIES[kind]
  hf = {
    'architectures': [family.class_name],
    'model_type': kind,
    'vocab_size': config.vocab_size,
    'hidden_size': config.hidden_size,
    'intermediate_size': config.intermediate_size,
    'num_hidden_layers': config.num_layers,
    'num_attention_heads': config.num_heads,
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_dim,
    'rms_norm_eps': config.rms_norm_eps,
    'tie_word_embeddings': config.tie_embeddings,
    'max_position_embeddings': config.max_position_embeddings,
    # Without this null, `transformers` would take the family's default id,
    # which may lie outside of a small vocabulary.
    'pad_token_id': None,
    'torch_dtype': 'float32',
    **rope_lib.write(config, family),
    **family.fixed,
    **{
      name: getattr(config, taking[0])
      for name, taking in family.options.items()
    },
  }
  if windows := family.windows:
    hf['sliding_window'] = max(config.layer_windows) or None
    if windows.switch:
      hf[windows.switch] = any(config.windows)
    if windows.typed:
      hf['layer_types'] = [
        rope_lib.SLIDING if window else rope_lib.FULL
        for window in config.layer_windows
      ]
  if config.num_experts:
    hf['decoder_sparse_step'] = 1
    hf['mlp_only_layers'] = list(config.dense_layers)
  return hf


def _dense_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
  """Returns the indices of the layers without experts in a model with experts.

  Raises:
    ValueError: the file leaves no layer with experts.
  """
  layers = fields_lib.needed(hf, 'num_hidden_layers')
  step, listed = hf.get('decoder_sparse_step', 1), hf.get('mlp_only_layers', ())
  dense = tuple(n for n in range(layers) if n in listed or (n + 1) % step)
  if len(dense) == layers:
    raise ValueError(
      f'decoder_sparse_step={step} and mlp_only_layers={list(listed)} leave no '
      'layer with experts'
    )
  return dense


def _windows(
  hf: Mapping[str, Any], windows: families.Windows | None
) -> tuple[int, ...]:
  """Returns the window of each layer, 0 for no window; () if all are 0."""
  layers = fields_lib.needed(hf, 'num_hidden_layers')
  size = hf.get('sliding_window')
  supported: Sequence[str] = (rope_lib.FULL,)
  if not size or not windows or not hf.get(windows.switch, not windows.switch):
    windows = None
  else:
    supported = (rope_lib.FULL, rope_lib.SLIDING)[not windows.typed :]
  types = hf.get('layer_types')
  others = set(types or ()) - set(supported)
  if others:
    raise ValueError(
      f'layer_types {", ".join(sorted(others))} are not supported; supported: '
      + ', '.join(supported)
    )
  if types is not None and len(types) != layers:
    raise ValueError(
      f'layer_types has {len(types)} entries: must have as many as '
      f'num_hidden_layers={layers}'
    )
  if windows is None or not size:
    return ()
  every = windows.every and hf.get('sliding_window_pattern', windows.every)
  first = windows.first and hf.get('max_window_layers', windows.first)
  slides = [
    n >= first and (not every or (n + 1) % every > 0) for n in range(layers)
  ]
  if types is not None:
    slides = [name == rope_lib.SLIDING for name in types]
  return tuple(size * x for x in slides) if any(slides) else ()
