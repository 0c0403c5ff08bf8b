"""Shapes that cannot be, and Hugging Face configs that are not ours."""

import dataclasses

import pytest

from stppo_jax.models import config as model_config
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


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'num_heads': 3, 'num_kv_heads': 2}, 'num_heads=3 .*num_kv_heads=2'),
    ({'head_dim': 7}, 'head_dim=7 must be even'),
  ],
)
def test_impossible_shapes_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    tiny.model(**changes)


def test_what_a_config_leaves_out_is_derived():
  config = model_config.ModelConfig.from_hf(_HF, **_RUNTIME)
  assert (config.num_kv_heads, config.head_dim) == (4, 4)
  assert config.qkv_bias and not config.tie_embeddings
  assert config.rope_theta == 1e6


def test_there_and_back_is_the_same():
  config = tiny.model(num_kv_heads=2, rope_theta=1e6).config
  again = model_config.ModelConfig.from_hf(config.to_hf(), **_RUNTIME)
  assert again == config


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'model_type': 'gpt2'}, "model_type 'gpt2'; supported: qwen2, llama"),
    ({'model_type': 'llama', 'attention_bias': True}, 'attention_bias'),
    ({'rope_scaling': {'rope_type': 'yarn'}}, 'rope scaling .*yarn'),
    ({'use_sliding_window': True}, 'use_sliding_window'),
  ],
)
def test_what_is_not_implemented_is_named(changes, message):
  with pytest.raises(ValueError, match=message):
    model_config.ModelConfig.from_hf(_HF | changes, **_RUNTIME)


def test_without_biases_it_is_a_llama():
  config = dataclasses.replace(tiny.model().config, qkv_bias=False)
  hf = config.to_hf()
  assert hf['model_type'] == 'llama'
  assert hf['architectures'] == ['LlamaForCausalLM']
  assert model_config.ModelConfig.from_hf(hf, **_RUNTIME) == config
