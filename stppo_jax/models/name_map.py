"""Our parameter names and those of Hugging Face's Qwen2, one to one."""

import dataclasses

from stppo_jax.models import config as model_config

_LAYER = {
  'attention_norm/scale': 'input_layernorm.weight',
  'q_proj/kernel': 'self_attn.q_proj.weight',
  'q_proj/bias': 'self_attn.q_proj.bias',
  'k_proj/kernel': 'self_attn.k_proj.weight',
  'k_proj/bias': 'self_attn.k_proj.bias',
  'v_proj/kernel': 'self_attn.v_proj.weight',
  'v_proj/bias': 'self_attn.v_proj.bias',
  'o_proj/kernel': 'self_attn.o_proj.weight',
  'mlp_norm/scale': 'post_attention_layernorm.weight',
  'gate_proj/kernel': 'mlp.gate_proj.weight',
  'up_proj/kernel': 'mlp.up_proj.weight',
  'down_proj/kernel': 'mlp.down_proj.weight',
}
_TOP = {
  'embedding': 'model.embed_tokens.weight',
  'norm/scale': 'model.norm.weight',
  'lm_head': 'lm_head.weight',
}


@dataclasses.dataclass(frozen=True)
class Entry:
  """One tensor there, one leaf or a part of one here.

  Attributes:
    hf_name: name of the tensor.
    path: keys of the leaf in the parameter tree.
    index: of the part, on the leaf's leading axes (the layer, say); () where
      the tensor is the whole leaf.
    transposed: kernels are [in, out] here and [out, in] there.
  """

  hf_name: str
  path: tuple[str, ...]
  index: tuple[int, ...]
  transposed: bool


def entries(config: model_config.ModelConfig) -> list[Entry]:
  """Every tensor of a policy of this shape."""
  result = []
  for ours, theirs in _TOP.items():
    if ours == 'lm_head' and config.tie_embeddings:
      continue
    result.append(Entry(theirs, tuple(ours.split('/')), (), False))
  for layer in range(config.num_layers):
    for ours, theirs in _LAYER.items():
      if ours.endswith('bias') and not config.qkv_bias:
        continue
      path = ('layers', *ours.split('/'))
      name = f'model.layers.{layer}.{theirs}'
      result.append(Entry(name, path, (layer,), ours.endswith('kernel')))
  return result
