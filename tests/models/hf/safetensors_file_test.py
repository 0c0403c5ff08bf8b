"""One file, compared with the library that defines the format."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from stppo_jax.models.hf import safetensors_file

_RNG = np.random.default_rng(0)
_TENSORS = {
  'matrix': _RNG.standard_normal((5, 3)).astype(np.float32),
  'half': _RNG.standard_normal(7).astype(np.float16),
  'brain': _RNG.standard_normal((2, 2, 3)).astype(ml_dtypes.bfloat16),
  'scalar': np.array(1.5, np.float32),
  'ids': np.arange(3),
}


@pytest.fixture
def path(tmp_path):
  path = tmp_path / 'some.safetensors'
  safetensors.numpy.save_file(_TENSORS, path, metadata={'format': 'pt'})
  return path


def test_files_of_the_library_are_read(path):
  tensors = safetensors_file.read_header(path)
  assert tensors.keys() == _TENSORS.keys()
  for name, tensor in tensors.items():
    assert tensor.shape == _TENSORS[name].shape
    if name != 'ids':
      np.testing.assert_array_equal(tensor.read(), _TENSORS[name])
      assert tensor.read().dtype == _TENSORS[name].dtype


def test_a_slice_reads_no_more_of_the_file(tmp_path):
  path = tmp_path / 'large.safetensors'
  rows = np.arange(2048, dtype=np.float32)
  safetensors.numpy.save_file({'x': np.tile(rows[:, None], 8192)}, path)
  del rows
  script = f"""
from stppo_jax.models.hf import safetensors_file

def resident():
  with open('/proc/self/statm') as file:
    return int(file.read().split()[1]) * 4096

x = safetensors_file.read_header({str(path)!r})['x']
before = resident()
assert (x.read((slice(5, 7), slice(99, 300))) == [[5], [6]]).all()
assert resident() - before < 8 << 20, resident() - before
"""
  subprocess.run([sys.executable, '-c', script], check=True)


@pytest.mark.parametrize('dtype', ['F32', 'BF16'])
def test_the_library_reads_our_files(tmp_path, dtype):
  matrix, half = _TENSORS['matrix'], _TENSORS['half']
  path = tmp_path / 'new.safetensors'
  with open(path, 'wb') as file:
    safetensors_file.write(
      file,
      {'matrix': (5, 3), 'turned': (3, 5), 'half': (7,)},
      dtype,
      # Whole, or by rows; in memory in any order.
      iter([matrix[:2], matrix[2:], matrix.T, half]),
    )
  found = safetensors.numpy.load_file(path)
  expected = safetensors_file.DTYPES[dtype]
  for name, value in (('matrix', matrix), ('turned', matrix.T), ('half', half)):
    assert found[name].dtype == expected
    np.testing.assert_array_equal(found[name], value.astype(expected))


def test_a_file_that_is_cut_short_or_damaged_is_named_in_one_line(path):
  whole = path.read_bytes()
  damaged = [whole[:size] for size in range(0, len(whole), 7)]
  damaged += [whole + b'x', whole.replace(b'F32', b'F99'), b'\xff' * 20]
  for content in damaged:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f'^{path}: [^\n]*$'):
      safetensors_file.read_header(path)
