"""`checkpoint convert`: weights alone are read from what may run code."""

import os
import shutil
import sys

import numpy as np
import pytest

from stppo_jax import __main__
from stppo_jax.models.hf import load
from stppo_jax.models.hf import peft
from tests.training import runs

_MODEL = runs.REPO / 'assets' / 'quickstart'


def _convert(place, out):
  return __main__.main(['checkpoint', 'convert', str(place), f'--out={out}'])


def _others(folder):
  """Copies all but the weights into a new folder."""
  ignored = shutil.ignore_patterns('*.safetensors')
  return shutil.copytree(_MODEL, folder, ignore=ignored)


def test_a_pickle_is_refused_with_the_command_that_converts_it(tmp_path, hub):
  folder = _others(tmp_path / 'model')
  with pytest.raises(ValueError, match=f'index.json in {folder}$'):
    load.check_weights(folder, load.read_config(folder))
  (folder / 'pytorch_model.bin').write_bytes(b'code')
  hub.add('org/old', folder)
  for place in (str(folder), 'org/old'):
    with pytest.raises(
      ValueError,
      match=f'in {place}; python -m stppo_jax checkpoint convert {place} '
      '--out=DIR converts pytorch_model.bin to safetensors',
    ):
      load.check_weights(place, load.read_config(place))
  (folder / peft.CONFIG).write_text('{"r": 2, "lora_alpha": 2}')
  with pytest.raises(
    ValueError, match=f'adapter_model.safetensors in {folder}$'
  ):
    peft.options(folder)
  (folder / 'adapter_model.bin').write_bytes(b'code')
  with pytest.raises(
    ValueError,
    match='no adapter_model.safetensors in .*; checkpoint convert makes it',
  ):
    peft.options(folder)


def test_without_torch_a_line_names_the_extra(tmp_path, capsys, monkeypatch):
  monkeypatch.setitem(sys.modules, 'torch', None)
  (tmp_path / 'pytorch_model.bin').write_bytes(b'weights')
  assert _convert(tmp_path, tmp_path / 'out') == 2
  assert "pip install '.[torch]' in the clone" in capsys.readouterr().err


@pytest.mark.torch
def test_converted_weights_are_the_same(tmp_path, capsys, hub):
  torch = pytest.importorskip('torch', exc_type=ImportError)
  from safetensors import torch as safetensors_torch

  folder = _others(tmp_path / 'model')
  tensors = safetensors_torch.load_file(_MODEL / 'model.safetensors')
  # Tied weights share their memory in files of torch.
  tensors['lm_head.weight'] = tensors['model.embed_tokens.weight']
  torch.save(tensors, folder / 'pytorch_model.bin')
  hub.add('org/old', folder)
  for number, place in enumerate((folder, 'org/old')):
    out = tmp_path / f'out{number}'
    assert _convert(place, out) == 0
    shape = load.read_config(out)
    load.check_weights(out, shape)
    ours, wanted = (load.read_params(x, shape) for x in (out, _MODEL))
    np.testing.assert_array_equal(ours['embedding'], wanted['embedding'])
    assert (out / 'tokenizer.json').is_file()
    assert not list(out.glob('*.bin'))
  assert _convert(_MODEL, tmp_path / 'none') == 2
  assert 'no pytorch_model.bin to convert' in capsys.readouterr().err

  class Code:
    def __reduce__(self):
      return os.mkdir, (str(tmp_path / 'ran'),)

  torch.save({'x': Code()}, folder / 'pytorch_model.bin')
  assert _convert(folder, tmp_path / 'code') == 2
  assert 'holds something other than weights' in capsys.readouterr().err
  assert not (tmp_path / 'ran').exists()


@pytest.mark.torch
def test_several_files_keep_their_index(tmp_path, capsys):
  torch = pytest.importorskip('torch', exc_type=ImportError)
  from safetensors import torch as safetensors_torch

  folder = _others(tmp_path / 'model')
  tensors = safetensors_torch.load_file(_MODEL / 'model.safetensors')
  names = sorted(tensors)
  index = {}
  for number, part in enumerate((names[:5], names[5:]), 1):
    name = f'pytorch_model-0000{number}-of-00002.bin'
    torch.save({key: tensors[key] for key in part}, folder / name)
    index |= dict.fromkeys(part, name)
  text = str({'metadata': {}, 'weight_map': index}).replace("'", '"')
  path = folder / 'pytorch_model.bin.index.json'
  path.write_text('{"metadata": {}}')
  assert _convert(folder, tmp_path / 'out') == 2
  assert capsys.readouterr().err.endswith(f'{path}: no weight_map\n')
  path.write_text(text)
  # The last file is damaged, so that the first one is converted in vain.
  whole = (folder / name).read_bytes()
  (folder / name).write_bytes(whole[:-100])
  assert _convert(folder, tmp_path / 'out') == 2
  assert f'{name} holds something other' in capsys.readouterr().err
  assert [x.name for x in tmp_path.iterdir()] == ['model']
  (folder / name).write_bytes(whole)
  assert _convert(folder, tmp_path / 'out') == 0
  shape = load.read_config(tmp_path / 'out')
  ours, wanted = (
    load.read_params(x, shape) for x in (tmp_path / 'out', _MODEL)
  )
  np.testing.assert_array_equal(ours['embedding'], wanted['embedding'])
