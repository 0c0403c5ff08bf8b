"""The names of parameters here and of tensors in Hugging Face files.

All architectures of `models/config.py` use the same names. Our layers are
stacked, so a leaf has a tensor for each layer; the experts are one leaf
[layers, experts, in, out] with a tensor for each expert of each layer.
"""

import dataclasses

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


@dataclasses.dataclass(frozen=True)
class Entry:
  """A tensor of a file and its place in the parameter tree.

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
    for ours, theirs in _LAYER.items()
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


def _entry(ours: str, theirs: str, index: tuple[int, ...]) -> Entry:
  path = ('layers', *ours.split('/'))
  return Entry(theirs, path, index, ours.endswith('kernel'))
