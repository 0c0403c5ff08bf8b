"""Exported directories: their bits, and which libraries load them."""

import dataclasses
import json
import os

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from stppo_jax.models import functional
from stppo_jax.models import heads
from stppo_jax.models.hf import config_json
from stppo_jax.models.hf import export
from stppo_jax.models.hf import load
from stppo_jax.models.hf import weight_files
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from stppo_jax.sampling import tokenizer as tokenizer_lib
from tests.models import tiny

_DENSE = tiny.model()
_MODELS = {
  'qwen2': tiny.model(tie_embeddings=True),
  'llama': tiny.model(qkv_bias=False),
  'qwen3': tiny.model(qkv_bias=False, qk_norm=True),
  'qwen3_moe': tiny.model(**tiny.MIXED),
}


def _placed(model, sizes):
  mesh = mesh_lib.make_mesh(**dict(zip(('data', 'fsdp', 'tensor'), sizes)))
  params = tiny.params(model)
  return jax.device_put(params, sharding.param_shardings(params, mesh))


def _tensors(folder):
  found = {}
  for path in folder.glob('*.safetensors'):
    found |= safetensors.numpy.load_file(path)
  return found


def _same_bits(actual, expected):
  assert actual.keys() == expected.keys()
  for name, value in expected.items():
    assert actual[name].dtype == value.dtype, name
    assert actual[name].tobytes() == value.tobytes(), name


# Slices of everything, and of a few layers, experts or rows.
@pytest.mark.parametrize('block_bytes', [2**24, 1100])
@pytest.mark.parametrize(
  'sizes', [pytest.param((8, 1, 1), marks=pytest.mark.slow), (2, 2, 2)]
)
@pytest.mark.parametrize('name', ['qwen2', 'qwen3_moe'])
def test_any_sharding_gives_the_same_file(
  tmp_path, monkeypatch, name, sizes, block_bytes
):
  model = _MODELS[name]
  export.export(tmp_path / 'host', model.config, tiny.params(model))
  monkeypatch.setattr(weight_files, 'SLICE_BYTES', block_bytes)
  export.export(tmp_path / 'mesh', model.config, _placed(model, sizes))
  _same_bits(_tensors(tmp_path / 'mesh'), _tensors(tmp_path / 'host'))
  again = load.read_params(tmp_path / 'mesh', model.config)
  jax.tree.map(np.testing.assert_array_equal, again, tiny.params(model))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_load_and_export_change_no_bit(tmp_path, dtype):
  model = _MODELS['qwen3_moe']
  params = tiny.params(model)
  export.export(tmp_path / 'a', model.config, params, dtype=dtype)
  loaded = load.read_params(tmp_path / 'a', model.config)
  export.export(tmp_path / 'b', model.config, loaded, dtype=dtype)
  first = _tensors(tmp_path / 'a')
  _same_bits(_tensors(tmp_path / 'b'), first)
  expected = np.dtype(getattr(ml_dtypes, dtype, dtype))
  assert {tensor.dtype for tensor in first.values()} == {expected}
  config = json.loads((tmp_path / 'b' / 'config.json').read_text())
  assert config['torch_dtype'] == dtype


def test_large_weights_are_split_into_files(tmp_path):
  params = tiny.params(_DENSE)
  export.export(tmp_path / 'one', _DENSE.config, params)
  export.export(tmp_path / 'many', _DENSE.config, params, max_shard_bytes=3000)
  files = sorted((tmp_path / 'many').glob('*.safetensors'))
  assert len(files) > 3
  assert files[0].name == f'model-00001-of-{len(files):05d}.safetensors'
  for file in files:
    tensors = safetensors.numpy.load_file(file)
    assert sum(tensor.nbytes for tensor in tensors.values()) <= 3000
  _same_bits(_tensors(tmp_path / 'many'), _tensors(tmp_path / 'one'))
  index = json.loads((tmp_path / 'many' / weight_files.INDEX).read_text())
  assert index['weight_map'].keys() == _tensors(tmp_path / 'one').keys()
  total = sum(t.nbytes for t in _tensors(tmp_path / 'one').values())
  assert index['metadata'] == {'total_size': total}
  again = load.read_params(tmp_path / 'many', _DENSE.config)
  jax.tree.map(np.testing.assert_array_equal, again, params)
  # An export in one file removes the several files of an earlier one.
  export.export(tmp_path / 'many', _DENSE.config, params)
  assert sorted(os.listdir(tmp_path / 'many')) == [
    'config.json',
    weight_files.SINGLE,
  ]


def test_the_sources_config_is_kept(tmp_path):
  source = tmp_path / 'source'
  source.mkdir()
  config = config_json.write(_DENSE.config) | {
    'torch_dtype': 'bfloat16',
    'bos_token_id': 3,
    'max_window_layers': 28,
  }
  (source / 'config.json').write_text(json.dumps(config))
  (source / 'generation_config.json').write_text('{"eos_token_id": [1, 2]}')
  (source / 'tokenizer.json').write_text('{"a": 1}')
  (source / 'README.md').write_text('about another model')
  out = tmp_path / 'out'
  export.export(
    out,
    _DENSE.config,
    tiny.params(_DENSE),
    source=source,
    save_tokenizer=lambda folder: export.copy_tokenizer(source, folder),
  )
  assert json.loads((out / 'config.json').read_text()) == config | {
    'torch_dtype': 'float32'
  }
  for name in ('generation_config.json', 'tokenizer.json'):
    assert (out / name).read_bytes() == (source / name).read_bytes()
  assert not (out / 'README.md').exists()


def test_a_failure_in_the_middle_leaves_the_old_export(tmp_path, monkeypatch):
  out = tmp_path / 'out'
  export.export(out, _DENSE.config, tiny.params(_DENSE))
  before = {path.name: path.read_bytes() for path in out.iterdir()}

  def full(folder):
    assert (folder / weight_files.SINGLE).is_file()
    raise OSError(28, 'No space left on device')

  with pytest.raises(OSError, match='No space left'):
    export.export(
      out, _DENSE.config, tiny.params(_DENSE, seed=1), save_tokenizer=full
    )
  assert {path.name: path.read_bytes() for path in out.iterdir()} == before
  assert os.listdir(tmp_path) == ['out']


def _greedy(model, params, prompt, count):
  """Returns the likeliest tokens after a prompt, by whole forward passes."""
  tokens = list(prompt)
  length = len(prompt) + count
  for _ in range(count):
    row = np.zeros((1, length), np.int32)
    row[0, : len(tokens)] = tokens
    hidden_1LD = tiny.hidden(model)(params, row)
    logits_1LV = heads.logits(hidden_1LD, model.output_VD(params))
    tokens.append(int(np.argmax(logits_1LV[0, len(tokens) - 1])))
  return tokens


@pytest.mark.torch
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('name', _MODELS)
def test_transformers_loads_an_export_and_generates_the_same(
  tmp_path, name, dtype
):
  torch = pytest.importorskip('torch', exc_type=ImportError)
  import transformers

  # Byte-level, because `transformers` accepts no other for these architectures.
  tokenizer = tokenizer_lib.train_byte_level_bpe(['who is it? ' * 9], 280)
  shape = dataclasses.replace(
    _MODELS[name].config, vocab_size=tokenizer.vocab_size
  )
  model = functional.Model(shape, 'vocabulary')
  export.export(
    tmp_path,
    shape,
    tiny.params(model),
    dtype=dtype,
    save_tokenizer=tokenizer.save,
    max_shard_bytes=5000,
  )
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, dtype='float32'
  )
  prompt = tokenizer.encode_text('who is it?').tolist()
  auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
  assert auto.encode('who is it?', add_special_tokens=False) == prompt
  with torch.no_grad():
    written = theirs.generate(
      torch.tensor([prompt]),
      attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
      do_sample=False,
      max_new_tokens=12,
      min_new_tokens=12,
      pad_token_id=0,
      eos_token_id=None,
    )
  params = load.read_params(tmp_path, shape)
  assert written[0].tolist() == _greedy(model, params, prompt, 12)
