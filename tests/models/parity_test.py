"""Against `transformers` in float32; numbers made by golden/make_qwen2.py."""

import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy

from stppo_jax.models import export_hf
from stppo_jax.models import functional
from stppo_jax.models import heads
from stppo_jax.models import load_hf

_GOLDEN = pathlib.Path(__file__).parent.parent / 'golden'


def _load(name):
  directory = _GOLDEN / f'qwen2_{name}'
  config = load_hf.read_config(
    directory, dtype='float32', remat='none', scan_unroll=1
  )
  return directory, config, load_hf.read_params(directory, config)


@pytest.mark.parametrize('name', ['tied', 'untied'])
def test_logits_equal_those_of_transformers(name):
  directory, config, params = _load(name)
  golden = np.load(directory / 'logits.npz')
  model = functional.Model(config, 'vocabulary')
  hidden_BLD = jax.jit(model.hidden)(params, golden['tokens_BL'])
  logits_BLV = heads.logits(hidden_BLD, model.output_VD(params))
  np.testing.assert_allclose(logits_BLV, golden['logits_BLV'], atol=1e-4)


def test_token_logprobs_are_of_the_token_itself():
  directory, config, params = _load('untied')
  golden = np.load(directory / 'logits.npz')
  temperature = 0.7
  scores = np.float64(golden['logits_BLV']) / temperature
  log_all = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
  logprobs_BL, entropy_BL = functional.Model(
    config, 'vocabulary'
  ).logprobs_and_entropy(params, golden['tokens_BL'], temperature=temperature)
  for b, row in enumerate(golden['tokens_BL']):
    assert logprobs_BL[b, 0] == 0 and entropy_BL[b, 0] == 0
    for position in range(1, len(row)):
      before = log_all[b, position - 1]
      np.testing.assert_allclose(
        logprobs_BL[b, position], before[row[position]], atol=1e-4
      )
      np.testing.assert_allclose(
        entropy_BL[b, position], -(np.exp(before) * before).sum(), atol=1e-4
      )


@pytest.mark.parametrize('name', ['tied', 'untied'])
def test_round_trip_is_bit_identical(name, tmp_path):
  directory, config, params = _load(name)
  export_hf.export(tmp_path, config, params)
  before = safetensors.numpy.load_file(directory / 'model.safetensors')
  after = safetensors.numpy.load_file(tmp_path / 'model.safetensors')
  assert before.keys() == after.keys()
  for key, value in before.items():
    assert np.array_equal(value, after[key]), key
  again = load_hf.read_config(
    tmp_path, dtype='float32', remat='none', scan_unroll=1
  )
  assert again == config


def test_a_missing_tensor_is_named(tmp_path):
  _, config, params = _load('tied')
  export_hf.export(tmp_path, config, params)
  path = tmp_path / 'model.safetensors'
  tensors = safetensors.numpy.load_file(path)
  del tensors['model.norm.weight']
  safetensors.numpy.save_file(tensors, path)
  with pytest.raises(ValueError, match='missing tensors .*model.norm.weight'):
    load_hf.read_params(tmp_path, config)


def test_a_mis_shaped_tensor_is_named(tmp_path):
  _, config, params = _load('tied')
  export_hf.export(tmp_path, config, params)
  path = tmp_path / 'model.safetensors'
  tensors = safetensors.numpy.load_file(path)
  tensors['model.norm.weight'] = np.zeros(3, np.float32)
  safetensors.numpy.save_file(tensors, path)
  with pytest.raises(ValueError, match=r'model.norm.weight gives shape \(3,\)'):
    load_hf.read_params(tmp_path, config)
