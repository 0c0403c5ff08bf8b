"""Lists the families of models: their blocks, and the names of their tensors.

A family is an entry of `FAMILIES`. "Tensor" here means a tensor of a Hugging
Face file, and "leaf" an array of our parameter tree. Layers are stacked in the
tree, so the values of a leaf come from one tensor for each layer. The matrices
of experts are leaves [layers, experts, in, out], with a tensor for each expert
of each layer. In some families, a tensor contains several leaves of a layer,
each leaf as a range of the tensor's rows.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import functools
import operator
from typing import Any, NamedTuple

from stppo_jax.models import config as model_config

_LAYER = {
  'attention_norm/scale': 'input_layernorm.weight',
  'q_proj/kernel': 'self_attn.q_proj.weight',
  'q_proj/bias': 'self_attn.q_proj.bias',
  'q_norm/scale': 'self_attn.q_norm.weight',
  'k_proj/kernel': 'self_attn.k_proj.weight',
  'k_proj/bias': 'self_attn.k_proj.bias',
  'k_norm/scale': 'self_attn.k_norm.weight',
  'v_proj/kernel': 'self_attn.v_proj.weight',
  'v_proj/bias': 'self_attn.v_proj.bias',
  'o_proj/kernel': 'self_attn.o_proj.weight',
  'o_proj/bias': 'self_attn.o_proj.bias',
  'mlp_norm/scale': 'post_attention_layernorm.weight',
}
_DENSE = {
  'gate_proj/kernel': 'mlp.gate_proj.weight',
  'gate_proj/bias': 'mlp.gate_proj.bias',
  'up_proj/kernel': 'mlp.up_proj.weight',
  'up_proj/bias': 'mlp.up_proj.bias',
  'down_proj/kernel': 'mlp.down_proj.weight',
  'down_proj/bias': 'mlp.down_proj.bias',
}
_ROUTER = {'moe/router/kernel': 'mlp.gate.weight'}
_EXPERT = {
  'moe/gate_proj/kernel': 'gate_proj.weight',
  'moe/up_proj/kernel': 'up_proj.weight',
  'moe/down_proj/kernel': 'down_proj.weight',
}
_TOP = {
  'embedding': 'model.embed_tokens.weight',
  'norm/scale': 'model.norm.weight',
  'lm_head': 'lm_head.weight',
}
# Leaf -> field of `ModelConfig`. A model has the leaf if the field is true.
_NEEDS = {
  'q_proj/bias': 'qkv_bias',
  'k_proj/bias': 'qkv_bias',
  'v_proj/bias': 'qkv_bias',
  'o_proj/bias': 'o_bias',
  'q_norm/scale': 'qk_norm',
  'k_norm/scale': 'qk_norm',
  'gate_proj/bias': 'mlp_bias',
  'up_proj/bias': 'mlp_bias',
  'down_proj/bias': 'mlp_bias',
}


class Windows(NamedTuple):
  """Says which layers use the `sliding_window` of a `config.json`.

  If the file lists `layer_types`, this list decides instead of `first` and
  `every`.

  Attributes:
    switch: the field of the file that says whether layers use windows. If the
      file lacks this field, no layer uses a window. '': the family has no such
      field, and the attributes below decide.
    first: the index of the first layer with a window. If the file has
      `max_window_layers`, its value is used instead. 0: layers of all indices
      may have windows, and `max_window_layers` is not read.
    every: every n-th layer has no window, where n is this number. If the file
      has `sliding_window_pattern`, its value is used instead. 0: there are no
      such layers, and `sliding_window_pattern` is not read.
    typed: whether some layers may have a window while other layers have none.
      If false, either all layers have a window or no layer has, because
      `transformers` does not read `layer_types` for this family.
  """

  switch: str = ''
  first: int = 0
  every: int = 0
  typed: bool = True


class Family(NamedTuple):
  """Describes a family of models.

  Attributes:
    class_name: the class of `transformers` for these models.
    blocks: field of `ModelConfig` -> value that all models of the family have.
      Fields with their default value are left out.
    experts: whether experts take the place of the MLP, at least in some layers.
    options: field of a file -> the fields of `ModelConfig` that take its value.
    fixed: field of a file -> the only value that is supported.
    defaults: field of a file -> its value if the file lacks the field.
    windows: the layers that have a window; None: no layers.
    local_rope: the field of a file that gives the base of the rotary
      frequencies in layers with a window. These frequencies are then never
      scaled. '': all layers have the same rotary frequencies.
    names: path of a leaf in a layer -> the name of its tensor in a layer, where
      the name differs from the name in the family `llama`; '': the family has
      no such leaf. Leaves with the same name are parts of one tensor.
  """

  class_name: str
  blocks: Mapping[str, Any] = {}
  experts: bool = False
  options: Mapping[str, Sequence[str]] = {}
  fixed: Mapping[str, Any] = {'hidden_act': 'silu'}
  defaults: Mapping[str, Any] = {}
  windows: Windows | None = None
  local_rope: str = ''
  names: Mapping[str, str] = {}


_BIASES = {'attention_bias': ('qkv_bias', 'o_bias')}
# The fields that the file of a model with experts must have. `_MIXTURE` are all
# fields about experts with the same name in files and in `ModelConfig`.
NEEDED = ('num_experts', 'num_experts_per_tok', 'moe_intermediate_size')
_MIXTURE = (*NEEDED, 'norm_topk_prob', 'router_aux_loss_coef')
_LATE = Windows('use_sliding_window', first=28)
_OLMO_NAMES = {
  'attention_norm/scale': '',
  'attention_post_norm/scale': 'post_attention_layernorm.weight',
  'mlp_norm/scale': '',
  'mlp_post_norm/scale': 'post_feedforward_layernorm.weight',
}
_OLMO = Family(
  'Olmo2ForCausalLM',
  {'norms': 'after', 'qk_norm': True, 'qk_norm_whole': True},
  options=_BIASES,
  defaults={'rms_norm_eps': 1e-5},
  names=_OLMO_NAMES,
)

# `model_type` of Hugging Face -> the family of these models.
FAMILIES: Mapping[str, Family] = {
  'qwen2': Family(
    'Qwen2ForCausalLM',
    {'qkv_bias': True},
    defaults={'sliding_window': 4096},
    windows=_LATE,
  ),
  'qwen3': Family(
    'Qwen3ForCausalLM',
    {'qk_norm': True},
    options=_BIASES,
    defaults={'head_dim': 128, 'sliding_window': 4096},
    windows=_LATE,
  ),
  'llama': Family(
    'LlamaForCausalLM', options={**_BIASES, 'mlp_bias': ('mlp_bias',)}
  ),
  'qwen3_moe': Family(
    'Qwen3MoeForCausalLM',
    {'qk_norm': True},
    experts=True,
    options={**_BIASES, **{name: (name,) for name in _MIXTURE}},
    defaults={'norm_topk_prob': False, 'sliding_window': 4096},
    windows=Windows('use_sliding_window', typed=False),
  ),
  'mistral': Family(
    'MistralForCausalLM',
    defaults={'num_key_value_heads': 8, 'sliding_window': 4096},
    windows=Windows(typed=False),
  ),
  'phi3': Family(
    'Phi3ForCausalLM',
    options={'partial_rotary_factor': ('partial_rotary_factor',)},
    defaults={
      'rms_norm_eps': 1e-5,
      'partial_rotary_factor': 1.0,
      'original_max_position_embeddings': 4096,
    },
    windows=Windows(typed=False),
    names={
      **dict.fromkeys(
        ('q_proj/kernel', 'k_proj/kernel', 'v_proj/kernel'),
        'self_attn.qkv_proj.weight',
      ),
      **dict.fromkeys(
        ('gate_proj/kernel', 'up_proj/kernel'), 'mlp.gate_up_proj.weight'
      ),
    },
  ),
  'gemma3_text': Family(
    'Gemma3ForCausalLM',
    {
      'norms': 'both',
      'norm_offset': 1.0,
      'qk_norm': True,
      'activation': 'gelu_tanh',
      'scale_embedding': True,
    },
    options={
      **_BIASES,
      'query_pre_attn_scalar': ('query_pre_attn_scalar',),
    },
    fixed={'hidden_activation': 'gelu_pytorch_tanh'},
    defaults={
      'head_dim': 256,
      'num_key_value_heads': 4,
      'query_pre_attn_scalar': 256,
      'rope_local_base_freq': 10000.0,
      'rope_theta': 1e6,
      'sliding_window': 4096,
      'tie_word_embeddings': True,
    },
    windows=Windows(every=6),
    local_rope='rope_local_base_freq',
    names={
      'attention_post_norm/scale': 'post_attention_layernorm.weight',
      'mlp_norm/scale': 'pre_feedforward_layernorm.weight',
      'mlp_post_norm/scale': 'post_feedforward_layernorm.weight',
    },
  ),
  'olmo2': _OLMO,
  'olmo3': _OLMO._replace(
    class_name='Olmo3ForCausalLM',
    defaults={'rms_norm_eps': 1e-5, 'rope_theta': 5e5, 'sliding_window': 4096},
    windows=Windows(every=4),
    local_rope='rope_theta',
  ),
}

# In some families, a tensor contains several leaves. The names of such tensors
# end with one of these texts and '.weight'.
SHARED = tuple(
  name.removesuffix('.weight')
  for family in FAMILIES.values()
  for name, count in collections.Counter(family.names.values()).items()
  if name and count > 1
)


def find(model_type: str | None) -> Family:
  """Returns the family of a `model_type`; raises ValueError if unknown."""
  if model_type is None or model_type not in FAMILIES:
    raise ValueError(
      f'unsupported model_type {model_type!r}; supported: '
      + ', '.join(FAMILIES)
    )
  return FAMILIES[model_type]


def of(*, qkv_bias: bool, qk_norm: bool, num_experts: int) -> str:
  """Returns the first family that fits these fields of `ModelConfig`.

  The result is a key of `FAMILIES`. A family whose `blocks` set further fields
  is never returned.

  Raises:
    ValueError: there is no such family, so the model could not be exported.
  """
  asked = ('qkv_bias', 'qk_norm')
  choices: dict[tuple[bool, ...], str] = {}
  for name, family in FAMILIES.items():
    if not family.blocks.keys() - asked:
      blocks = *(family.blocks.get(x, False) for x in asked), family.experts
      choices.setdefault(blocks, name)
  blocks = (qkv_bias, qk_norm, num_experts > 0)
  if blocks in choices:
    return choices[blocks]
  listed = '; '.join(
    f'{name} (qkv_bias={bias}, qk_norm={norm}, num_experts '
    f'{"> 0" if experts else "= 0"})'
    for (bias, norm, experts), name in choices.items()
  )
  raise ValueError(
    f'qkv_bias={qkv_bias}, qk_norm={qk_norm} and num_experts={num_experts}: '
    f'no model family has these three values; choices: {listed}'
  )


@dataclasses.dataclass(frozen=True)
class Entry:
  """Says where a tensor of a file, or a part of it, belongs in the tree.

  Attributes:
    hf_name: name of the tensor.
    path: keys of the leaf in the parameter tree.
    index: the index (layer,) or (layer, expert) of the values on the leading
      axes of the leaf; () if the values are the whole leaf.
    transposed: whether the file has the two axes in the opposite order: kernels
      are [in, out] in our tree and [out, in] in files.
  """

  hf_name: str
  path: tuple[str, ...]
  index: tuple[int, ...]
  transposed: bool

  def shape(self, tree: Any) -> tuple[int, ...]:
    """Returns the shape of this part in the file.

    Args:
      tree: the parameter tree, of arrays or of shapes.
    """
    shape = leaf(tree, self.path).shape[len(self.index) :]
    return shape[::-1] if self.transposed else shape


def tensors(config: model_config.ModelConfig) -> dict[str, list[Entry]]:
  """Returns tensor name -> the parts of the tensor, in the order of its rows.

  A tensor that is not divided has one part.
  """
  result: dict[str, list[Entry]] = {}
  for entry in entries(config):
    result.setdefault(entry.hf_name, []).append(entry)
  return result


def tensor_shape(parts: Sequence[Entry], tree: Any) -> tuple[int, ...]:
  """Returns the shape of the tensor that has these parts; see `Entry.shape`."""
  shapes = [part.shape(tree) for part in parts]
  return (sum(rows for rows, *_ in shapes), *shapes[0][1:])


def entries(config: model_config.ModelConfig) -> list[Entry]:
  """Returns an entry for each tensor of a policy.

  If a tensor contains several leaves, each of its parts has an entry.
  """
  result = []
  for ours, theirs in _TOP.items():
    if ours == 'lm_head' and config.tie_embeddings:
      continue
    result.append(Entry(theirs, tuple(ours.split('/')), (), False))
  for layer, (stack, place) in enumerate(config.places):
    prefix = f'model.layers.{layer}.'
    experts = config.stacks[stack][0].num_experts
    names = _LAYER | (_ROUTER if experts else _DENSE)
    names |= FAMILIES[kind(config)].names
    for ours, theirs in names.items():
      if theirs and (ours not in _NEEDS or getattr(config, _NEEDS[ours])):
        result.append(_entry(stack, ours, prefix + theirs, (place,)))
    for expert in range(experts):
      for ours, theirs in _EXPERT.items():
        name = f'{prefix}mlp.experts.{expert}.{theirs}'
        result.append(_entry(stack, ours, name, (place, expert)))
  return result


def leaf(tree: Any, path: Sequence[str]) -> Any:
  """Returns the leaf at a path of a parameter tree."""
  return functools.reduce(operator.getitem, path, tree)


def kind(config: model_config.ModelConfig) -> str:
  """Returns the family of a model: `config.family`, or the result of `of`."""
  return config.family or of(
    qkv_bias=config.qkv_bias,
    qk_norm=config.qk_norm,
    num_experts=config.num_experts,
  )


def _entry(stack: str, ours: str, theirs: str, index: tuple[int, ...]) -> Entry:
  path = (stack, *ours.split('/'))
  return Entry(theirs, path, index, ours.endswith('kernel'))
