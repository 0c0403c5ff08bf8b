"""Lists the families of models: their blocks, and the names of their tensors.

A family is a row of `FAMILIES`. Our layers are stacked, so a leaf has a tensor
for each layer; the experts are one leaf [layers, experts, in, out] with a
tensor for each expert of each layer.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import operator
from typing import Any
from typing import NamedTuple

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
  'mlp_norm/scale': 'post_attention_layernorm.weight',
}
_DENSE = {
  'gate_proj/kernel': 'mlp.gate_proj.weight',
  'up_proj/kernel': 'mlp.up_proj.weight',
  'down_proj/kernel': 'mlp.down_proj.weight',
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


class Family(NamedTuple):
  """Describes a family of models.

  Attributes:
    class_name: the class of `transformers`.
    qkv_bias: whether queries, keys and values have biases.
    qk_norm: whether heads of queries and keys are normalised.
    experts: whether experts take the place of the MLP.
    head_dim: the size of a head where a file gives none; 0: heads divide the
      width equally.
    names: the names of a layer's tensors, by the paths of our leaves.
  """

  class_name: str
  qkv_bias: bool = False
  qk_norm: bool = False
  experts: bool = False
  head_dim: int = 0
  names: Mapping[str, str] = _LAYER


# Keyed by the `model_type` of Hugging Face.
FAMILIES: Mapping[str, Family] = {
  'qwen2': Family('Qwen2ForCausalLM', qkv_bias=True),
  'qwen3': Family('Qwen3ForCausalLM', qk_norm=True, head_dim=128),
  'llama': Family('LlamaForCausalLM'),
  'qwen3_moe': Family('Qwen3MoeForCausalLM', qk_norm=True, experts=True),
}


def find(model_type: str | None) -> Family:
  """Returns a family; raises ValueError with the choices if there is none."""
  if model_type is None or model_type not in FAMILIES:
    raise ValueError(
      f'unsupported model_type {model_type!r}; supported: '
      + ', '.join(FAMILIES)
    )
  return FAMILIES[model_type]


def of(*, qkv_bias: bool, qk_norm: bool, num_experts: int) -> str:
  """Returns the family of a model of these blocks, a key of `FAMILIES`.

  Raises:
    ValueError: there is none, so that the model could not be exported.
  """
  blocks = (qkv_bias, qk_norm, num_experts > 0)
  for name, family in FAMILIES.items():
    if (family.qkv_bias, family.qk_norm, family.experts) == blocks:
      return name
  choices = '; '.join(
    f'{name} (qkv_bias={x.qkv_bias}, qk_norm={x.qk_norm}, num_experts '
    f'{"> 0" if x.experts else "= 0"})'
    for name, x in FAMILIES.items()
  )
  raise ValueError(
    f'qkv_bias={qkv_bias}, qk_norm={qk_norm}, num_experts={num_experts} are '
    f'those of no family; choices: {choices}'
  )


@dataclasses.dataclass(frozen=True)
class Entry:
  """Says where a tensor of a file belongs in the parameter tree.

  Attributes:
    hf_name: name of the tensor.
    path: keys of the leaf in the parameter tree.
    index: index of the slice on the leaf's leading axes (layer, expert); () if
      the tensor is the whole leaf.
    transposed: whether the axes are swapped: kernels are [in, out] in our tree
      and [out, in] in files.
  """

  hf_name: str
  path: tuple[str, ...]
  index: tuple[int, ...]
  transposed: bool


def entries(config: model_config.ModelConfig) -> list[Entry]:
  """Returns every tensor of a policy of this shape."""
  result = []
  for ours, theirs in _TOP.items():
    if ours == 'lm_head' and config.tie_embeddings:
      continue
    result.append(Entry(theirs, tuple(ours.split('/')), (), False))
  names = {
    ours: theirs
    for ours, theirs in FAMILIES[kind(config)].names.items()
    if (config.qkv_bias or not ours.endswith('bias'))
    and (config.qk_norm or ours not in ('q_norm/scale', 'k_norm/scale'))
  } | (_ROUTER if config.num_experts else _DENSE)
  for layer in range(config.num_layers):
    prefix = f'model.layers.{layer}.'
    for ours, theirs in names.items():
      result.append(_entry(ours, prefix + theirs, (layer,)))
    for expert in range(config.num_experts):
      for ours, theirs in _EXPERT.items():
        name = f'{prefix}mlp.experts.{expert}.{theirs}'
        result.append(_entry(ours, name, (layer, expert)))
  return result


def leaf(tree: Any, path: Sequence[str]) -> Any:
  """Returns the leaf at a path of a parameter tree."""
  return functools.reduce(operator.getitem, path, tree)


def kind(config: model_config.ModelConfig) -> str:
  """Returns the family of a model; see `of`."""
  return of(
    qkv_bias=config.qkv_bias,
    qk_norm=config.qk_norm,
    num_experts=config.num_experts,
  )


def _entry(ours: str, theirs: str, index: tuple[int, ...]) -> Entry:
  path = ('layers', *ours.split('/'))
  return Entry(theirs, path, index, ours.endswith('kernel'))
