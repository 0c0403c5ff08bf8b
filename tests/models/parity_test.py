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

from stppo_jax.models import cache as cache_lib
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


# Tied weights are another output matrix only.
@pytest.mark.parametrize(
  'name',
  [
    pytest.param(
      name,
      marks=pytest.mark.slow
      if name in ('qwen3_tied', 'llama_tied', 'qwen3_moe_tied')
      else (),
    )
    for name in _NAMES
  ],
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


@pytest.mark.parametrize(
  'name',
  [
    'qwen2_untied',
    # Normalised queries and keys, which the mixture has too.
    pytest.param('qwen3_untied', marks=pytest.mark.slow),
    pytest.param('llama_untied', marks=pytest.mark.slow),
    pytest.param('qwen3_moe_untied', marks=pytest.mark.slow),
    'qwen3_moe_mixed',
    # A part of each head is rotated; windows in all layers and in some.
    pytest.param('phi3_untied', marks=pytest.mark.slow),
    pytest.param('mistral_untied', marks=pytest.mark.slow),
    'gemma3_text_tied',
    pytest.param('olmo3_untied', marks=pytest.mark.slow),
  ],
)
def test_decoding_from_a_cache_gives_the_same_logits(name):
  directory, config, params = _load(name)
  golden = _golden(directory)
  tokens_BL = golden['tokens_BL'].astype(np.int32)
  B, L = tokens_BL.shape
  model = functional.Model(config, 'vocabulary')
  cache = jax.tree.map(
    lambda x: np.zeros(x.shape, x.dtype),
    jax.eval_shape(lambda: cache_lib.empty(config, 2 * B, -(-L // 2))),
  )
  hidden = []
  for start in range(0, L, 5):
    count = min(5, L - start)
    tokens_BC = np.zeros((B, 5), np.int32)
    tokens_BC[:, :count] = tokens_BL[:, start : start + count]
    lengths_B, counts_B = (np.full(B, n, np.int32) for n in (start, count))
    hidden_BCD, cache = tiny.read_on(
      model, params, tokens_BC, cache, lengths_B, counts_B
    )
    hidden.append(np.asarray(hidden_BCD)[:, :count])
  hidden_BLD = np.concatenate(hidden, axis=1)
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
