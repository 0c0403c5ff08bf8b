"""Hugging Face configs: what is read, written and refused."""

import dataclasses
import json

import pytest

from stppo_jax.models import config as model_config
from stppo_jax.models.hf import config_json
from tests.models import tiny

_RUNTIME = {'dtype': 'float32', 'remat': 'none', 'scan_unroll': 1}
_HF = {
  'model_type': 'qwen2',
  'vocab_size': 11,
  'hidden_size': 16,
  'intermediate_size': 24,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'rope_theta': 1e6,
}
_MOE = {
  'model_type': 'qwen3_moe',
  'num_experts': 4,
  'num_experts_per_tok': 2,
  'moe_intermediate_size': 8,
}
_LLAMA3 = {
  'rope_type': 'llama3',
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 32,
}


def test_missing_fields_of_a_config_are_derived():
  config = config_json.read(_HF, **_RUNTIME)
  assert (config.num_kv_heads, config.head_dim) == (4, 4)
  assert config.qkv_bias and not config.tie_embeddings
  assert config.rope_theta == 1e6


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'model_type': 'gpt2'}, "'gpt2'; supported: qwen2, qwen3, llama"),
    ({'attention_bias': True}, 'attention_bias=True'),
    ({'model_type': 'gpt_oss'}, "^unsupported model_type 'gpt_oss'; supp"),
    ({'model_type': 'qwen3_next'}, "^unsupported model_type 'qwen3_next'; "),
    ({'model_type': 'qwen3_5_text'}, "^unsupported model_type 'qwen3_5_text'"),
    ({'hidden_act': 'gelu'}, "hidden_act='gelu' .*'silu'$"),
    ({'layer_types': ['sliding_attention']}, 'layer_types sliding_attention'),
    ({'quantization_config': {'bits': 4}}, 'quantization_config='),
    ({'rope_scaling': {'rope_type': 'xpos'}}, "'xpos'; supported: default, l"),
    ({'rope_scaling': {'rope_type': 'yarn'}}, '^lacks original_max_position_e'),
    (
      {'model_type': 'phi3', 'partial_rotary_factor': 0.3},
      'must rotate an even',
    ),
    ({'rope_parameters': {'rope_type': 'linear'}}, '^lacks factor$'),
    ({'num_hidden_layers': None}, '^lacks num_hidden_layers$'),
    (
      {'rope_scaling': _LLAMA3 | {'low_freq_factor': 4.0}},
      '^low_freq_factor=4.0: must be smaller than high_freq_factor=4.0$',
    ),
    (_MOE | {'mlp_only_layers': [1]}, r'mlp_only_layers=\[1\]'),
    (_MOE | {'num_experts': None}, 'lacks num_experts or num_local_experts$'),
    (_MOE | {'num_experts_per_tok': 5}, 'num_experts_per_tok=5'),
  ],
)
def test_unsupported_options_are_named(changes, message):
  with pytest.raises(ValueError, match=message) as caught:
    config_json.read(_HF | changes, **_RUNTIME)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'num_attention_heads': 0}, '^num_attention_heads=0: must be'),
    ({'vocab_size': True}, '^vocab_size=True: must be'),
    ({'layer_types': 5}, '^layer_types=5: must be'),
    ({'model_type': ['qwen2']}, r"^model_type=\['qwen2'\]: must be"),
    ({'tie_word_embeddings': 1}, '^tie_word_embeddings=1: must be'),
    ({'rope_scaling': {'factor': 'x'}}, "^rope_scaling.factor='x': must be"),
    (
      {'rope_parameters': {'full_attention': {'rope_type': []}}},
      r'^rope_parameters.full_attention.rope_type=\[\]: must be',
    ),
    ({'num_attention_heads': 32}, '^head_dim=0: must be'),
    (_MOE | {'router_aux_loss_coef': -1}, '^router_aux_loss_coef=-1: must be'),
  ],
)
def test_a_malformed_field_is_an_error_of_one_line(changes, message):
  with pytest.raises(ValueError, match=message) as caught:
    config_json.read(_HF | changes, **_RUNTIME)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  ('changes', 'kind', 'name'),
  [
    ({}, 'qwen2', 'Qwen2ForCausalLM'),
    ({'qkv_bias': False}, 'llama', 'LlamaForCausalLM'),
    ({'qkv_bias': False, 'qk_norm': True}, 'qwen3', 'Qwen3ForCausalLM'),
    (
      {
        'qkv_bias': False,
        'qk_norm': True,
        'num_experts': 4,
        'num_experts_per_tok': 2,
        'moe_intermediate_size': 6,
        'norm_topk_prob': False,
        'router_aux_loss_coef': 0.5,
      },
      'qwen3_moe',
      'Qwen3MoeForCausalLM',
    ),
  ],
)
@pytest.mark.parametrize(
  'rope',
  [
    None,
    model_config.RopeScaling('linear', 4.0),
    model_config.RopeScaling(**_LLAMA3),
  ],
)
def test_a_written_config_is_read_back_the_same(changes, kind, name, rope):
  config = dataclasses.replace(
    tiny.model().config, **changes, rope_scaling=rope, max_position_embeddings=9
  )
  hf = config_json.write(config)
  assert (hf['model_type'], hf['architectures']) == (kind, [name])
  hf = json.loads(json.dumps(hf))
  assert config_json.read(hf, **_RUNTIME) == config


def test_combinations_of_no_architecture_are_refused():
  config = tiny.model(qkv_bias=True, qk_norm=True).config
  with pytest.raises(ValueError, match=r'choices: qwen2 \(qkv_bias=True, '):
    config_json.write(config)


@pytest.mark.parametrize(
  'rope',
  [
    {'rope_scaling': _LLAMA3, 'rope_theta': 5e5},
    {'rope_parameters': _LLAMA3 | {'rope_theta': 5e5}},
    {'rope_parameters': {'full_attention': _LLAMA3 | {'rope_theta': 5e5}}},
  ],
)
def test_both_ways_to_write_rope_scaling_are_read(rope):
  hf = {key: value for key, value in _HF.items() if key != 'rope_theta'}
  config = config_json.read(hf | rope, **_RUNTIME)
  assert config.rope_theta == 5e5
  assert config.rope_scaling == model_config.RopeScaling(**_LLAMA3)


def test_old_names_and_defaults_are_read():
  old = {'rope_scaling': {'type': 'linear', 'factor': 2.0}}
  config = config_json.read(_HF | old, **_RUNTIME)
  assert config.rope_scaling == model_config.RopeScaling('linear', 2.0)
  # Llama 3's scaling defaults to the length that the model was made for.
  shorter = {key: _LLAMA3[key] for key in list(_LLAMA3)[:-1]}
  config = config_json.read(
    _HF | {'rope_scaling': shorter, 'max_position_embeddings': 77}, **_RUNTIME
  )
  assert config.rope_scaling.original_max_position_embeddings == 77
  qwen3 = _HF | {'model_type': 'qwen3'}
  assert config_json.read(qwen3, **_RUNTIME).head_dim == 128
  moe = _HF | _MOE
  moe['num_local_experts'] = moe.pop('num_experts')
  config = config_json.read(moe, **_RUNTIME)
  assert config.num_experts == 4 and not config.norm_topk_prob
