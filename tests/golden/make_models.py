"""Makes tests/golden/{qwen2,qwen3,llama,...}_*: tiny random models.

    pip install torch==2.13.0 transformers safetensors numpy
    python tests/golden/make_models.py [NAME ...]

Beside a model as `transformers` saves it stand the numbers of its torch class
in float32: logits, and for a mixture the experts that each token visited.
"""

import copy
import pathlib
import sys

import numpy as np
import torch
import transformers

_HERE = pathlib.Path(__file__).parent
_SMALL = {
  'vocab_size': 31,
  'hidden_size': 14,  # Llama needs a multiple of its 2 or 7 heads
  'intermediate_size': 16,
  'num_hidden_layers': 2,
  'head_dim': 8,
  'max_position_embeddings': 64,
  'rope_theta': 100.0,
  'dtype': 'bfloat16',
}
# The heads of these divide the width, which is a multiple of 2 and of 7.
_NO_HEAD_DIM = _SMALL | {'head_dim': None, 'hidden_size': 28, 'pad_token_id': 0}
KINDS = {
  'qwen2': _SMALL,
  'qwen3': _SMALL,
  'llama': _SMALL,
  'qwen3_moe': _SMALL
  | {
    'intermediate_size': 10,
    'moe_intermediate_size': 6,
    'num_experts': 5,
    'num_experts_per_tok': 2,
  },
  'mistral': _SMALL | {'sliding_window': 5},
  'phi3': _NO_HEAD_DIM | {'hidden_size': 56, 'partial_rotary_factor': 0.5},
  'gemma3_text': _SMALL
  | {
    'num_hidden_layers': 3,
    'query_pre_attn_scalar': 24,
    'rope_theta': None,  # it has one for each kind of layer
    'layer_types': ['sliding_attention', 'full_attention', 'sliding_attention'],
    'sliding_window': 5,
  },
  'olmo2': _NO_HEAD_DIM,
  'olmo3': _NO_HEAD_DIM
  | {
    'num_hidden_layers': 3,
    'layer_types': ['sliding_attention', 'full_attention', 'sliding_attention'],
    'sliding_window': 5,
  },
}
_LINEAR = {'rope_type': 'linear', 'factor': 4.0}
# Turns in 32 tokens: 5.1, 1.6, 0.5, 0.2. One pair is fast, one on the ramp.
LLAMA3 = {
  'rope_type': 'llama3',
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 32,
}
YARN = {
  'rope_type': 'yarn',
  'factor': 4.0,
  'original_max_position_embeddings': 64,
  'beta_fast': 4.0,
}
_QWEN2 = {
  'vocab_size': 61,
  'hidden_size': 16,
  'head_dim': None,
  'intermediate_size': 24,
  'rope_theta': 10000.0,
  'dtype': 'float32',
}
# kind, query heads, key and value heads, tied, other options
_CASES = {
  'qwen2_tied': ('qwen2', 4, 2, True, _QWEN2),
  'qwen2_untied': ('qwen2', 4, 4, False, _QWEN2),
  'qwen3_tied': ('qwen3', 2, 1, True, {}),
  'qwen3_untied': ('qwen3', 7, 1, False, {}),
  'llama_tied': ('llama', 2, 1, True, {'rope_scaling': _LINEAR}),
  'llama_untied': ('llama', 7, 1, False, {'rope_scaling': LLAMA3}),
  'qwen3_moe_tied': ('qwen3_moe', 2, 2, True, {'norm_topk_prob': False}),
  'qwen3_moe_untied': ('qwen3_moe', 2, 1, False, {'norm_topk_prob': True}),
  'qwen3_moe_mixed': (
    *('qwen3_moe', 2, 1, False),
    {'num_hidden_layers': 4, 'mlp_only_layers': [0, 2]},
  ),
  'mistral_untied': ('mistral', 2, 1, False, {'rope_scaling': YARN}),
  'phi3_untied': ('phi3', 2, 1, False, {}),
  'gemma3_text_tied': ('gemma3_text', 2, 1, True, {}),
  'olmo3_untied': ('olmo3', 2, 1, False, {'rope_scaling': YARN}),
}


def save(directory, kind, num_heads, num_kv_heads, tied, options, seed=0):
  """Saves a random model with biases and scales away from 0 and 1."""
  options = KINDS[kind] | copy.deepcopy(options)  # transformers adds to it
  dtype = getattr(torch, options.pop('dtype'))
  options = {key: x for key, x in options.items() if x is not None}
  torch.manual_seed(seed)
  config = transformers.AutoConfig.for_model(
    kind,
    num_attention_heads=num_heads,
    num_key_value_heads=num_kv_heads,
    tie_word_embeddings=tied,
    **options,
  )
  model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(0.2 * torch.randn_like(parameter))
  model.to(dtype).save_pretrained(directory)


def load(directory):
  """Returns the model in a directory, float32."""
  return transformers.AutoModelForCausalLM.from_pretrained(
    directory, dtype=torch.float32, experts_implementation='eager'
  )


def numbers(directory, shape):
  """Returns the results of the model in a directory, as arrays by name."""
  model = load(directory)
  tokens = torch.randint(0, model.config.vocab_size, shape)
  visited = []
  for layer in model.model.layers:
    if hasattr(layer.mlp, 'gate'):  # the router; a dense MLP has gate_proj
      layer.mlp.gate.register_forward_hook(
        lambda module, inputs, outputs: visited.append(outputs[2].numpy())
      )
  with torch.no_grad():
    logits = model(tokens).logits
  result = {'tokens_BL': tokens.numpy(), 'logits_BLV': logits.numpy()}
  if visited:
    visited = np.stack(visited, axis=1).astype(np.int32)
    result['expert_ids_BLNE'] = visited.reshape(*shape, *visited.shape[1:])
  return result


def main(names):
  for name in names or _CASES:
    save(_HERE / name, *_CASES[name])
    shape = (3, 17) if name.startswith('qwen2_') else (2, 13)
    np.savez(_HERE / name / 'logits.npz', **numbers(_HERE / name, shape))


if __name__ == '__main__':
  main(sys.argv[1:])
