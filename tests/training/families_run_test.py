"""Whole steps of training with directories of several families."""

import dataclasses
import functools
import json

import pytest

from stppo_jax.models.hf import export
from stppo_jax.models.hf import load
from tests.models import tiny
from tests.training import runs

_RUNTIME = {'dtype': 'float32', 'remat': 'none', 'scan_unroll': 1}


# Each compiles programs of its own. The first step also checks that engine and
# trainer compute the same log-probabilities.
@pytest.mark.slow
@pytest.mark.parametrize(
  'kind', ['mistral', 'phi3', 'gemma3_text', 'olmo3', 'qwen3_moe']
)
def test_a_family_trains_and_is_exported(kind, finished, tmp_path):
  tokenizer = finished / 'policy'
  vocab_size = load.read_config(tokenizer, **_RUNTIME).vocab_size
  shape = tiny.of_family(kind, window=20)
  shape |= {'dense_layers': (1,)} if kind == 'qwen3_moe' else {}
  model = tiny.model(vocab_size=vocab_size, **shape)
  copy = functools.partial(export.copy_tokenizer, tokenizer)
  source = tmp_path / 'source'
  params = tiny.params(model, scale=0.1)
  export.export(source, model.config, params, save_tokenizer=copy)
  changes = {'model__path': source, 'num_steps': 1, 'evaluate__every': 0}
  assert runs.train(tmp_path / 'run', **changes) == 0
  policy = tmp_path / 'run' / 'policy'
  written = json.loads((policy / 'config.json').read_text(encoding='utf-8'))
  assert written['model_type'] == kind
  config = load.read_config(policy, **_RUNTIME)
  kept = dataclasses.replace(
    model.config, max_position_embeddings=config.max_position_embeddings
  )
  assert config == kept
  trained = load.read_params(policy, config)
  assert (trained['norm']['scale'] != params['norm']['scale']).any()
