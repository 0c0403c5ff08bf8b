"""One file, compared with the library that defines the format."""

import numpy as np
import pytest
import safetensors.numpy

from stppo_jax.models.hf import safetensors_file

_RNG = np.random.default_rng(0)


@pytest.mark.parametrize('dtype', ['F32', 'BF16'])
def test_the_library_reads_our_files(tmp_path, dtype):
  matrix = _RNG.standard_normal((5, 3)).astype(np.float32)
  half = _RNG.standard_normal(7).astype(np.float16)
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


def test_a_file_that_is_cut_short_or_damaged_is_named_in_one_line(tmp_path):
  path = tmp_path / 'some.safetensors'
  whole = safetensors.numpy.save({'x': np.zeros((5, 3), np.float32)})
  damaged = [whole[:size] for size in range(0, len(whole), 7)]
  damaged += [whole + b'x', whole.replace(b'F32', b'F99'), b'\xff' * 20]
  for content in damaged:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f'^{path}: [^\n]*$'):
      safetensors_file.read_header(path)
