"""Against `transformers` in float32; numbers made by golden/make_models.py.

Every architecture, with its embedding tied and untied, one, two and seven query
heads to a key head, and positions scaled in either way.
"""

import json
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy

from stppo_jax.models import functional
from stppo_jax.models import heads
from stppo_jax.models.hf import export
from stppo_jax.models.hf import load
from tests.models import tiny

_GOLDEN = pathlib.Path(__file__).parent.parent / 'golden'
_NAMES = (
  'qwen2_tied',
  'qwen2_untied',
  'qwen3_tied',
  'qwen3_untied',
  'llama_tied',
  'llama_untied',
  'qwen3_moe_tied',
  'qwen3_moe_untied',
  'qwen3_moe_mixed',
  'mistral_untied',
  'phi3_untied',
  'gemma3_text_tied',
  'olmo3_untied',
)


def _load(name):
  directory = _GOLDEN / name
  config = load.read_config(
    directory, dtype='float32', remat='none', scan_unroll=1
  )
  return directory, config, load.read_params(directory, config)


def _golden(directory):
  return dict(np.load(directory / 'logits.npz'))


def _named(*fast):
  """Gives a test each name, and runs the others in `make test-slow` only."""
  return pytest.mark.parametrize(
    'name',
    [
      pytest.param(name, marks=() if name in fast else pytest.mark.slow)
      for name in _NAMES
    ],
  )


# Tied weights are another output matrix only. The mixture normalises queries
# and keys like Qwen3, and Gemma 3 has windows like Mistral.
@_named(
  *('qwen2_untied', 'qwen3_moe_mixed', 'llama_untied', 'phi3_untied'),
  *('gemma3_text_tied', 'olmo3_untied'),
)
def test_logits_and_routing_equal_those_of_transformers(name):
  directory, config, params = _load(name)
  golden = _golden(directory)
  model = functional.Model(config, 'vocabulary')

  @jax.jit
  def found(params, tokens_BL):
    hidden_BLD, routing = model.hidden_and_routing(params, tokens_BL)
    return heads.logits(hidden_BLD, model.output_VD(params)), routing

  logits_BLV, routing = found(params, golden['tokens_BL'])
  np.testing.assert_allclose(logits_BLV, golden['logits_BLV'], atol=1e-4)
  assert np.ptp(golden['logits_BLV'], axis=-1).min() > 0.1
  assert (routing is not None) == ('expert_ids_BLNE' in golden)
  if routing is not None:  # the experts are in the order of their weights
    expert_ids = golden['expert_ids_BLNE']
    np.testing.assert_array_equal(routing.expert_ids, expert_ids)
    assert len(np.unique(expert_ids)) == config.num_experts


# cache_test.py and routing_test.py read other models from a cache.
@_named('gemma3_text_tied')  # windows in some layers
def test_decoding_from_a_cache_gives_the_same_logits(name):
  directory, config, params = _load(name)
  golden = _golden(directory)
  B, L = golden['tokens_BL'].shape
  model = functional.Model(config, 'vocabulary')
  cache = tiny.cache_of(config, 2 * B, -(-L // 2))
  hidden_BLD, _ = tiny.read_in_chunks(
    model, params, golden['tokens_BL'], cache, 5
  )
  logits_BLV = hidden_BLD @ np.asarray(model.output_VD(params)).T
  np.testing.assert_allclose(logits_BLV, golden['logits_BLV'], atol=1e-4)


@pytest.mark.parametrize('name', _NAMES)
def test_round_trip_is_bit_identical(name, tmp_path):
  directory, config, params = _load(name)
  hf = json.loads((directory / 'config.json').read_text(encoding='utf-8'))
  export.export(
    tmp_path / 'out', config, params, dtype=hf['dtype'], source=directory
  )
  before = safetensors.numpy.load_file(directory / 'model.safetensors')
  after = safetensors.numpy.load_file(tmp_path / 'out' / 'model.safetensors')
  assert before.keys() == after.keys()
  for key, value in before.items():
    assert value.dtype == after[key].dtype, key
    assert np.array_equal(value, after[key]), key
  written = (tmp_path / 'out' / 'config.json').read_text(encoding='utf-8')
  assert json.loads(written) == hf
