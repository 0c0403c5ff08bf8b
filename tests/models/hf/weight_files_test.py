"""Finding the files that hold the weights, and checking their index."""

import json

import numpy as np
import pytest
import safetensors.numpy

from stppo_jax.models.hf import weight_files

_FILES = (
  'model-00001-of-00002.safetensors',
  'model-00002-of-00002.safetensors',
)
_MAP = {'a': _FILES[0], 'b': _FILES[0], 'c': _FILES[1]}


def _write(folder, weight_map=_MAP):
  for file in _FILES:
    names = [name for name, where in _MAP.items() if where == file]
    tensors = {name: np.full(2, ord(name), np.float32) for name in names}
    safetensors.numpy.save_file(tensors, folder / file)
  content = {'metadata': {'total_size': 7}, 'weight_map': weight_map}
  (folder / weight_files.INDEX).write_text(json.dumps(content))


def test_all_tensors_of_an_index_are_found(tmp_path):
  _write(tmp_path)
  tensors = weight_files.read_headers(tmp_path)
  assert {name: t.path.name for name, t in tensors.items()} == _MAP
  for name, tensor in tensors.items():
    np.testing.assert_array_equal(tensor.read(), [ord(name)] * 2)


def test_a_single_file_is_preferred_to_an_index(tmp_path):
  _write(tmp_path)
  tensors = {'a': np.zeros(3, np.float32)}
  safetensors.numpy.save_file(tensors, tmp_path / weight_files.SINGLE)
  assert weight_files.read_headers(tmp_path)['a'].shape == (3,)


@pytest.mark.parametrize(
  ('weight_map', 'expected'),
  [
    (_MAP | {'d': 'other.safetensors'}, 'other.safetensors'),
    (_MAP | {'d': _FILES[1]}, f'{_FILES[1]}: lacks .*: d$'),
    ({'a': _FILES[0], 'c': _FILES[1]}, f'{_FILES[0]}: has .*: b$'),
    (_MAP | {'d': f'../x/{_FILES[0]}'}, 'is not a file name'),
    ([], 'no weight_map'),
  ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(
  tmp_path, weight_map, expected
):
  _write(tmp_path, weight_map)
  with pytest.raises(ValueError, match=expected) as caught:
    weight_files.read_headers(tmp_path)
  assert '\n' not in str(caught.value)


def test_a_directory_without_weights_is_refused(tmp_path):
  with pytest.raises(ValueError, match=f'no model.safetensors .*{tmp_path}'):
    weight_files.read_headers(tmp_path)
