"""The models' shape of a config has no hidden default."""

import dataclasses
import json

import pytest

from stppo_jax.configs import base
from stppo_jax.learner import weights
from stppo_jax.models import config as model_config
from stppo_jax.training import model_files
from tests.training import runs

# The fields of a shape that no config key sets.
_FROM_TOKENIZER = {'vocab_size'}
# Fields that only models of files have; random ones are Qwen's or Llama's.
_AS_PUBLISHED = {
  *('family', 'o_bias', 'mlp_bias', 'qk_norm_whole', 'norms', 'norm_offset'),
  *('activation', 'scale_embedding', 'query_pre_attn_scalar', 'windows'),
  *('partial_rotary_factor', 'local_rope_theta', 'rope_scaling'),
  *('max_position_embeddings', 'dense_layers'),
}
_OF_THE_ENGINE = {'cache'}  # which rollout.cache_dtype sets
_OF_VALUE_MODELS = {'value_outputs'}  # which loss.value_bins sets
_MIXTURE = {
  'qkv_bias': False,
  'qk_norm': True,
  'num_experts': 3,
  'num_experts_per_tok': 2,
  'moe_intermediate_size': 5,
}


def _tokenizer():
  return model_files.load_tokenizer(runs.REPO / 'assets' / 'quickstart')


def test_every_other_field_is_a_key():
  config = base.get_config()
  fields = {f.name for f in dataclasses.fields(model_config.ModelConfig)}
  said = set(config.model) | set(weights.compute_options(config))
  others = _FROM_TOKENIZER | _AS_PUBLISHED | _OF_THE_ENGINE | _OF_VALUE_MODELS
  assert fields - said == others


def test_every_key_sets_its_field():
  before = model_files.shape(runs.config(), _tokenizer())
  assert before.vocab_size == 290
  changes = _MIXTURE | {
    'num_heads': 4,
    'num_kv_heads': 2,
    'head_dim': 6,
    'rope_theta': 7.0,
    'norm_topk_prob': False,
    'router_aux_loss_coef': 0.5,
    'scan_unroll': 2,
    'dtype': 'bfloat16',
  }
  config = runs.config(**{f'model__{k}': x for k, x in changes.items()})
  after = model_files.shape(config, _tokenizer())
  assert after == dataclasses.replace(before, **changes)


def test_what_makes_no_difference_is_not_compared():
  dense = model_files.shape(runs.config(), _tokenizer())
  names = set(model_config.compared(dense))
  assert {'hidden_size', 'intermediate_size', 'rope_theta'} < names
  assert not names & {'norm_topk_prob', 'remat', 'max_position_embeddings'}
  mixture = dataclasses.replace(dense, **_MIXTURE)
  names = set(model_config.compared(mixture))
  assert 'norm_topk_prob' in names and 'intermediate_size' not in names
  mixed = dataclasses.replace(mixture, dense_layers=(0,))
  assert 'intermediate_size' in model_config.compared(mixed)


@pytest.mark.parametrize(
  ('files', 'expected'),
  [
    ({}, (289,)),
    ({'generation_config.json': 7}, (289, 7)),
    ({'generation_config.json': [5, 289]}, (289, 5)),
    ({'config.json': [5, 6]}, (289, 5, 6)),
    ({'config.json': 5, 'generation_config.json': 6}, (289, 6)),
    ({'config.json': 5, 'generation_config.json': None}, (289, 5)),
  ],
)
def test_a_directory_lists_the_tokens_that_end_a_turn(
  tmp_path, files, expected
):
  for name, ids in files.items():
    (tmp_path / name).write_text(json.dumps({'eos_token_id': ids}))
  config, tokenizer = base.get_config(), _tokenizer()
  assert tokenizer.eos_id == 289
  config.model.path = str(tmp_path)
  assert model_files.end_token_ids(config, tokenizer) == expected
  # Ids of another directory's tokenizer mean nothing for this one.
  config.model.tokenizer_path = str(runs.REPO / 'assets' / 'quickstart')
  assert model_files.end_token_ids(config, tokenizer) == (289,)
  config.model.eos_token_ids = (3, 4)
  assert model_files.end_token_ids(config, tokenizer) == (3, 4)


def test_a_shape_of_the_config_has_room_for_the_longest_trajectory():
  config = runs.config(env__max_length=70_000)
  shape = model_files.shape(config, _tokenizer())
  assert shape.max_position_embeddings == 70_000
