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


_TYPES = ['sliding_attention', 'full_attention']
_YARN = {
  'rope_type': 'yarn',
  'factor': 4.0,
  'original_max_position_embeddings': 32,
}
_LONG = {'short_factor': [1.0, 2.0], 'long_factor': [3.0, 4.0], 'type': 'su'}


def _of(kind, **changes):
  """Returns the fields of a small model of this kind."""
  return _HF | {'model_type': kind} | changes


def _scaled(kind='qwen2', more=None, **rope):
  """Returns the fields of a model whose positions are scaled like this."""
  return _of(kind, rope_scaling=rope, **more or {})


def _longrope(more=None, **rope):
  return _scaled('phi3', more, **_LONG | rope)


@pytest.mark.parametrize(
  ('hf', 'message'),
  [
    (_of('gpt2'), "^unsupported model_type 'gpt2'; supported: qwen2, qwen3, l"),
    (_of('qwen3_next'), "^unsupported model_type 'qwen3_next'; supp"),
    (_of('gemma3'), "'gemma3'; supported: .*gemma3_text"),
    (_of('qwen2', attention_bias=True), 'attention_bias=True'),
    (_of('qwen2', hidden_act='gelu'), "hidden_act='gelu' .*'silu'$"),
    (_of('qwen2', layer_types=_TYPES), 'layer_types sliding_attention are not'),
    (_of('qwen2', quantization_config={'bits': 4}), 'quantization_config='),
    (_scaled(rope_type='xpos'), "'xpos'; supported: default, l"),
    (
      _scaled(more={'max_position_embeddings': None}, rope_type='yarn'),
      '^lacks original_max_position_e',
    ),
    (_of('phi3', partial_rotary_factor=0.3), 'must rotate an even'),
    (_of('qwen2', rope_parameters={'rope_type': 'linear'}), '^lacks factor$'),
    (_of('qwen2', num_hidden_layers=None), '^lacks num_hidden_layers$'),
    (
      _scaled(**_LLAMA3 | {'low_freq_factor': 4.0}),
      '^low_freq_factor=4.0: must be smaller than high_freq_factor=4.0$',
    ),
    (
      _HF | _MOE | {'mlp_only_layers': [1], 'decoder_sparse_step': 2},
      r'^decoder_sparse_step=2 and mlp_only_layers=\[1\] leave no layer with',
    ),
    (_HF | _MOE | {'num_experts': None}, 'lacks num_experts or num_local_exp'),
    (_HF | _MOE | {'num_experts_per_tok': 5}, 'num_experts_per_tok=5'),
    # What other families have.
    (_of('llama', use_sliding_window=True), 'use_sliding_window=True is not'),
    (_of('llama', partial_rotary_factor=0.5), 'partial_rotary_factor=0.5 is'),
    (_of('mistral', layer_types=_TYPES), 'layer_types full_attention are not'),
    (
      _of('olmo3', layer_types=_TYPES[:1]),
      '^layer_types has 1 entries: must h',
    ),
    (
      _of('olmo3', rope_parameters={'sliding_attention': _YARN}),
      "^unsupported rope scaling 'yarn' of layers with a window; supported: d",
    ),
    (_of('gemma3_text', hidden_activation='silu'), "^hidden_activation='silu'"),
    (_of('gemma3_text', final_logit_softcapping=30.0), 'softcapping=30.0 is'),
    (_of('gemma3_text', use_bidirectional_attention=True), '=True is not supp'),
    (
      _longrope(long_factor=[1.0], attention_factor=1.0),
      '^long_factor has 1 numbers: must have 2, one for each pair that is rot',
    ),
    (
      _longrope({'original_max_position_embeddings': 1}),
      '^original_max_position_embeddings=1: must be greater than 1 with longro',
    ),
    (
      _scaled('llama', {'head_dim': 2}, type='dynamic', factor=2.0),
      '^rope scaling dynamic: must rotate 4 numbers of a head or more, not 2$',
    ),
    (
      _scaled('llama', {'rope_theta': 1.0}, **_YARN),
      '^rope_theta=1.0: must not be 1 with yarn$',
    ),
    # Malformed fields.
    (_of('qwen2', num_attention_heads=0), '^num_attention_heads=0: must be'),
    (_of('qwen2', num_attention_heads=32), '^head_dim=0: must be'),
    (_of('qwen2', vocab_size=True), '^vocab_size=True: must be'),
    (_of('qwen2', layer_types=5), '^layer_types=5: must be'),
    (_of(['qwen2']), r"^model_type=\['qwen2'\]: must be"),
    (_of('qwen2', tie_word_embeddings=1), '^tie_word_embeddings=1: must be'),
    (_scaled(factor='x'), "^rope_scaling.factor='x': must be"),
    (
      _of('qwen2', rope_parameters={'full_attention': {'rope_type': []}}),
      r'^rope_parameters.full_attention.rope_type=\[\]: must be',
    ),
    (
      _HF | _MOE | {'router_aux_loss_coef': -1},
      '^router_aux_loss_coef=-1: mus',
    ),
    (
      _HF | _MOE | {'decoder_sparse_step': 0},
      '^decoder_sparse_step=0: must be',
    ),
    (_HF | _MOE | {'mlp_only_layers': [-1]}, r'^mlp_only_layers=\[-1\]: must '),
    (_of('gemma3_text', query_pre_attn_scalar=0), '=0: must be a number gr'),
    (_of('phi3', sliding_window=1.5), '^sliding_window=1.5: must be an inte'),
    (_of('llama', rope_theta=10**400), '^rope_theta=10+: must be a number gre'),
    (
      _longrope(short_factor=[0]),
      r'^rope_scaling.short_factor=\[0\]: must be a list of numbers greater',
    ),
  ],
)
def test_what_cannot_be_read_is_an_error_of_one_line(hf, message):
  hf = {'max_position_embeddings': 8, 'num_key_value_heads': 4} | hf
  with pytest.raises(ValueError, match=message) as caught:
    config_json.read(hf, **_RUNTIME)
  assert '\n' not in str(caught.value)


# The test of every family reads and writes all names.
@pytest.mark.parametrize(
  ('changes', 'name'),
  [
    ({}, 'Qwen2ForCausalLM'),
    (
      tiny.MIXTURE
      | {
        'norm_topk_prob': False,
        'router_aux_loss_coef': 0.5,
        'dense_layers': (1,),
      },
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
def test_a_written_config_is_read_back_the_same(changes, name, rope):
  config = dataclasses.replace(
    tiny.model().config, **changes, rope_scaling=rope, max_position_embeddings=9
  )
  hf = json.loads(json.dumps(config_json.write(config)))
  assert hf['architectures'] == [name]
  assert config_json.read(hf, **_RUNTIME) == config


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
    ('mistral', {}, {'windows': (4096, 4096)}),
    ('mistral', {'sliding_window': None}, {'windows': ()}),
    (
      'phi3',
      {'rope_scaling': _LONG, 'max_position_embeddings': 4096**2},
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
    ('phi3', _LONG, 32, True),
    ('phi3', _LONG, 33, False),
  ],
)
def test_the_longest_text_decides_about_rotations(kind, rope, longest, plain):
  hf = _of(kind, rope_scaling=rope, max_position_embeddings=64)
  if kind == 'phi3':
    hf['original_max_position_embeddings'] = 32
  short, asked = (
    rotary.frequencies(config_json.read(hf, longest=size, **_RUNTIME))
    for size in (1, longest)
  )
  assert np.array_equal(short, asked) == plain


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
  config = config_json.read(_HF, **_RUNTIME)
  assert (config.num_kv_heads, config.head_dim) == (4, 4)
  assert config.qkv_bias and not config.tie_embeddings
  assert config.rope_theta == 1e6
  old = {'rope_scaling': {'type': 'linear', 'factor': 2.0}}
  config = config_json.read(_HF | old, **_RUNTIME)
  assert config.rope_scaling == model_config.RopeScaling('linear', 2.0)
  # Llama 3's scaling defaults to the length that the model was made for.
  shorter = {key: _LLAMA3[key] for key in list(_LLAMA3)[:-1]}
  hf = _of('qwen2', rope_scaling=shorter, max_position_embeddings=77)
  config = config_json.read(hf, **_RUNTIME)
  assert config.rope_scaling.original_max_position_embeddings == 77
  assert config_json.read(_of('qwen3'), **_RUNTIME).head_dim == 128
  moe = _HF | _MOE
  moe['num_local_experts'] = moe.pop('num_experts')
  config = config_json.read(moe, **_RUNTIME)
  assert config.num_experts == 4 and not config.norm_topk_prob
