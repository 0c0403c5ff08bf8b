"""Hugging Face configs: what is read, written and refused."""

import dataclasses
import json
import math

import numpy as np
import pytest

from stppo_jax.models import config as model_config
from stppo_jax.models import rotary
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
    (
      _MOE | {'mlp_only_layers': [1], 'decoder_sparse_step': 2},
      r'^decoder_sparse_step=2 and mlp_only_layers=\[1\] leave no layer with',
    ),
    (_MOE | {'num_experts': None}, 'lacks num_experts or num_local_experts$'),
    (_MOE | {'num_experts_per_tok': 5}, 'num_experts_per_tok=5'),
    # Malformed fields.
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
    (_MOE | {'decoder_sparse_step': 0}, '^decoder_sparse_step=0: must be'),
    (_MOE | {'mlp_only_layers': [-1]}, r'^mlp_only_layers=\[-1\]: must be'),
  ],
)
def test_what_cannot_be_read_is_an_error_of_one_line(changes, message):
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
        'dense_layers': (1,),
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


_TYPES = ['sliding_attention', 'full_attention']
_YARN = {
  'rope_type': 'yarn',
  'factor': 4.0,
  'original_max_position_embeddings': 32,
}
_LONG = {'short_factor': [1.0, 2.0], 'long_factor': [3.0, 4.0]}


@pytest.mark.parametrize(
  ('kind', 'changes', 'expected'),
  [
    # Layers from the 28th on have a window, unless the file says otherwise.
    ('qwen2', {'use_sliding_window': True}, {'windows': ()}),
    (
      'qwen3',
      {'use_sliding_window': True, 'max_window_layers': 1, 'sliding_window': 9},
      {'windows': (0, 9), 'head_dim': 128},
    ),
    ('qwen3', {'sliding_window': 9}, {'windows': ()}),
    (
      'qwen3_moe',
      _MOE | {'use_sliding_window': True, 'attention_bias': True},
      {'windows': (4096, 4096), 'qkv_bias': True, 'o_bias': True},
    ),
    ('qwen3_moe', _MOE | {'mlp_only_layers': [1, 7]}, {'dense_layers': (1,)}),
    ('qwen3_moe', _MOE | {'decoder_sparse_step': 2}, {'dense_layers': (0,)}),
    ('llama', {'attention_bias': True}, {'qkv_bias': True, 'mlp_bias': False}),
    ('mistral', {'num_key_value_heads': 2}, {'windows': (4096, 4096)}),
    (
      'mistral',
      {'num_key_value_heads': 2, 'sliding_window': None},
      {'windows': ()},
    ),
    (
      'phi3',
      {
        'rope_scaling': _LONG | {'type': 'su'},
        'max_position_embeddings': 4096**2,
      },
      {'windows': (), 'rms_norm_eps': 1e-5},
    ),
    (
      'gemma3_text',
      {'sliding_window_pattern': 2},
      {
        'windows': (4096, 0),
        'local_rope_theta': 10000.0,
        'rope_theta': 1e6,
        'query_pre_attn_scalar': 256,
        'tie_embeddings': True,
        'norms': 'both',
      },
    ),
    ('gemma3_text', {'rope_local_base_freq': 7.0}, {'windows': (4096, 4096)}),
    ('olmo2', {'rope_scaling': _YARN}, {'norms': 'after', 'windows': ()}),
    (
      'olmo3',
      {
        'layer_types': _TYPES,
        'sliding_window': 6,
        'rope_theta': 3.0,
        'rope_scaling': _YARN,
      },
      {'windows': (6, 0), 'rope_theta': 3.0, 'local_rope_theta': 3.0},
    ),
  ],
)
def test_every_family_is_read_and_written(kind, changes, expected):
  hf = {name: x for name, x in _HF.items() if name != 'rope_theta'}
  hf |= {'num_key_value_heads': 4}
  config = config_json.read(hf | changes | {'model_type': kind}, **_RUNTIME)
  found = dataclasses.asdict(config)
  assert {name: found[name] for name in expected} == expected
  written = json.loads(json.dumps(config_json.write(config)))
  assert written['model_type'] == kind
  again = config_json.read(written, **_RUNTIME)
  assert (again, again.family) == (config, kind)


@pytest.mark.parametrize(
  ('rope', 'factor'),
  [
    ({}, 0.1 * math.log(4.0) + 1.0),
    ({'attention_factor': 1.5}, 1.5),
    (
      {'mscale': 0.5, 'mscale_all_dim': 2.0},
      (0.05 * math.log(4.0) + 1.0) / (0.2 * math.log(4.0) + 1.0),
    ),
  ],
)
def test_yarn_has_the_factor_of_its_paper_unless_another_is_given(rope, factor):
  config = config_json.read(_HF | {'rope_scaling': _YARN | rope}, **_RUNTIME)
  assert config.rope_scaling.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize(
  ('kind', 'rope', 'longest', 'plain'),
  [
    ('qwen2', {'type': 'dynamic', 'factor': 2.0}, 64, True),
    ('qwen2', {'type': 'dynamic', 'factor': 2.0}, 65, False),
    ('phi3', _LONG | {'type': 'longrope'}, 32, True),
    ('phi3', _LONG | {'type': 'longrope'}, 33, False),
  ],
)
def test_the_longest_text_decides_about_rotations(kind, rope, longest, plain):
  hf = _HF | {
    'model_type': kind,
    'rope_scaling': rope,
    'max_position_embeddings': 64,
  }
  if kind == 'phi3':
    hf['original_max_position_embeddings'] = 32
  short, asked = (
    rotary.frequencies(config_json.read(hf, longest=size, **_RUNTIME))
    for size in (1, longest)
  )
  assert np.array_equal(short, asked) == plain


@pytest.mark.parametrize(
  ('kind', 'changes', 'message'),
  [
    ('llama', {'use_sliding_window': True}, 'use_sliding_window=True is not'),
    ('llama', {'partial_rotary_factor': 0.5}, 'partial_rotary_factor=0.5 is'),
    ('qwen2', {'layer_types': _TYPES}, 'layer_types sliding_attention are not'),
    ('mistral', {'layer_types': _TYPES}, 'layer_types full_attention are not'),
    (
      'olmo3',
      {'layer_types': _TYPES[:1]},
      '^layer_types has 1 entries: must have as many as num_hidden_layers=2$',
    ),
    (
      'olmo3',
      {'rope_parameters': {'sliding_attention': _YARN}},
      "^unsupported rope scaling 'yarn' of layers with a window; supported: d",
    ),
    (
      'gemma3_text',
      {'hidden_activation': 'silu'},
      "^hidden_activation='silu' ",
    ),
    ('gemma3_text', {'final_logit_softcapping': 30.0}, 'softcapping=30.0 is'),
    ('gemma3_text', {'use_bidirectional_attention': True}, '=True is not supp'),
    ('gemma3_text', {'query_pre_attn_scalar': 0}, '=0: must be a number gr'),
    (
      'phi3',
      {'sliding_window': 1.5},
      '^sliding_window=1.5: must be an integer',
    ),
    (
      'phi3',
      {
        'rope_scaling': _LONG
        | {'type': 'longrope', 'long_factor': [1.0], 'attention_factor': 1.0}
      },
      '^long_factor has 1 numbers: must have 2, one for each pair that is rot',
    ),
    (
      'phi3',
      {
        'rope_scaling': _LONG
        | {'type': 'longrope', 'short_factor': [], 'attention_factor': 1.0}
      },
      '^short_factor has 0 numbers: must have 2, one for each pair that is rot',
    ),
    (
      'phi3',
      {
        'rope_scaling': _LONG | {'type': 'longrope'},
        'max_position_embeddings': 8,
        'original_max_position_embeddings': 1,
      },
      '^original_max_position_embeddings=1: must be greater than 1 with longro',
    ),
    (
      'llama',
      {
        'head_dim': 2,
        'max_position_embeddings': 8,
        'rope_scaling': {'type': 'dynamic', 'factor': 2.0},
      },
      '^rope scaling dynamic: must rotate 4 numbers of a head or more, not 2$',
    ),
    (
      'llama',
      {'rope_theta': 1.0, 'rope_scaling': _YARN},
      '^rope_theta=1.0: must not be 1 with yarn$',
    ),
    ('llama', {'rope_theta': 10**400}, '^rope_theta=10+: must be a number gre'),
    (
      'phi3',
      {'rope_scaling': _LONG | {'type': 'longrope', 'short_factor': [0]}},
      r'^rope_scaling.short_factor=\[0\]: must be a list of numbers greater',
    ),
    (
      'gemma3',
      {},
      "^unsupported model_type 'gemma3'; supported: .*gemma3_text",
    ),
  ],
)
def test_what_a_family_lacks_is_an_error_of_one_line(kind, changes, message):
  hf = _HF | {'num_key_value_heads': 4, 'model_type': kind}
  with pytest.raises(ValueError, match=message) as caught:
    config_json.read(hf | changes, **_RUNTIME)
  assert '\n' not in str(caught.value)


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
