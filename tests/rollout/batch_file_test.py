"""Files of saved batches: the arrays read, and the files refused."""

import io
import os
import zipfile

import numpy as np
import pytest

from stppo_jax.rollout import batch_file
from stppo_jax.tools.lab import saved_batch
from tests.tools.lab import batch_arrays


def test_a_file_comes_back_as_it_was_saved(tmp_path):
  arrays, *_ = batch_arrays.arrays()
  arrays.pop('turn_z_BL')  # the lab forms it, and reads none
  path = tmp_path / 'a name without ending'
  batch_file.save(path, arrays | {'another': np.zeros(3)})
  assert os.listdir(tmp_path) == [path.name]
  found = saved_batch.load(path)
  assert found.keys() == arrays.keys()
  for name, array in arrays.items():
    np.testing.assert_array_equal(found[name], array)
    assert found[name].dtype == array.dtype
  with np.load(path, allow_pickle=False) as archive:
    assert 'another' in archive.files


def test_a_save_that_fails_leaves_the_old_file(tmp_path):
  path = tmp_path / 'F.npz'
  batch_file.save(path, {'loss_mask_BL': np.ones((1, 2), bool)})
  with pytest.raises(ValueError, match='allow_pickle'):
    batch_file.save(path, {'loss_mask_BL': np.array([object()])})
  assert os.listdir(tmp_path) == ['F.npz']
  assert saved_batch.load(path)['loss_mask_BL'].shape == (1, 2)


def _zip(**members):
  file = io.BytesIO()
  with zipfile.ZipFile(file, 'w') as archive:
    for name, content in members.items():
      archive.writestr(f'{name}.npy', content)
  return file.getvalue()


def _npy(array, **options):
  file = io.BytesIO()
  np.save(file, array, **options)
  return file.getvalue()


def _with_header(old, new):
  """Returns the bytes of a .npy file whose header has other text in a place."""
  whole = _npy(np.ones((2, 3), bool))
  end, start = whole.index(b'\n'), whole.index(old)
  return whole[:start] + new.ljust(end - start) + whole[end:]


def _of_array(content):
  """Returns the bytes of an archive whose only array has these bytes."""
  return _zip(loss_mask_BL=content)


_NO_FILE, _CUT_OFF = 'not an npz file', 'not a sound npz file'
_NO_ARRAY = f'{_CUT_OFF}: loss_mask_BL'
_SQUARE = _npy(np.ones((2, 2)))
_OBJECT = _npy(np.array([[{}]]), allow_pickle=True)
_LARGE = b'%d' % 10**32


@pytest.mark.parametrize(
  ('content', 'expected'),
  [
    (b'', _NO_FILE),
    (b'no archive', _NO_FILE),
    (b'\x80\x04N.', _NO_FILE),  # a pickle, of nothing
    (_SQUARE, _NO_FILE),
    (b'PK\x03\x04 cut off', _CUT_OFF),
    (b'PK', _CUT_OFF),
    (_of_array(_SQUARE)[:-8], _CUT_OFF),
    (_of_array(b'no array'), _NO_ARRAY),
    (_of_array(_SQUARE[:-4]), _NO_ARRAY),
    (_of_array(_npy(np.ones(2))).replace(b'\xf0?', b'AA'), _NO_ARRAY),
    (_of_array(_OBJECT), _NO_ARRAY),
    # Numpy raises a different kind of error for each of these headers.
    (_of_array(_with_header(b"'shape'", b"'shape': (8")), _NO_ARRAY),
    (_of_array(_with_header(b'{', b'{[]: 1}')), _NO_ARRAY),
    (_of_array(_with_header(b"'shape'", b"'shape': (10**32,)}")), _NO_ARRAY),
    (
      _of_array(_with_header(b"'shape'", b"'shape': (" + _LARGE + b',), }')),
      _NO_ARRAY,
    ),
  ],
)
def test_a_file_that_is_not_sound_is_one_line(tmp_path, content, expected):
  path = tmp_path / 'F.npz'
  path.write_bytes(content)
  with pytest.raises(ValueError) as caught:
    saved_batch.load(path)
  assert str(caught.value).startswith(expected)
  assert '\n' not in str(caught.value)


def test_objects_under_other_names_are_never_unpacked(tmp_path):
  path = tmp_path / 'F.npz'
  path.write_bytes(_zip(loss_mask_BL=_SQUARE, notes=_OBJECT))
  assert saved_batch.load(path).keys() == {'loss_mask_BL'}


@pytest.mark.parametrize('name', ['loss_mask_BL.npy', 'loss_mask_BL'])
def test_a_small_file_cannot_fill_the_memory(tmp_path, name):
  path = tmp_path / 'F.npz'
  with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
    archive.writestr(name, _npy(np.ones((2, 3), bool)))
    # What zipfile goes by; to pack so many bytes takes too long for a test.
    archive.getinfo(name).file_size = 5 << 30
  with pytest.raises(ValueError, match='^its compressed arrays take 536870912'):
    saved_batch.load(path)
  lies = _with_header(b"'shape'", b"'shape': (999999999999,), }")
  path.write_bytes(_zip(loss_mask_BL=lies))
  with pytest.raises(ValueError) as caught:
    saved_batch.load(path)
  assert str(caught.value).startswith(_NO_ARRAY)


def test_a_file_without_a_known_array_lists_their_names(tmp_path):
  batch_file.save(tmp_path / 'F.npz', {'x': np.zeros(3)})
  with pytest.raises(ValueError, match='has no array .*: tokens_BL, lengths_B'):
    saved_batch.load(tmp_path / 'F.npz')


def test_advantages_come_from_their_own_file(tmp_path):
  arrays, batch, *_ = batch_arrays.arrays()
  mask = batch.loss_mask_BL
  path = tmp_path / 'A.npz'
  load = lambda: saved_batch.load_advantages(path, mask, dtype=np.float32)
  given = np.where(mask, 7.5, np.nan)
  batch_file.save(path, {'advantages_BL': given})
  found = load()
  assert found.dtype == np.float32
  np.testing.assert_array_equal(found, given)
  # Its own mask, where it has one, is another's.
  batch_file.save(path, {'loss_mask_BL': ~mask, 'advantages_BL': given})
  np.testing.assert_array_equal(load(), given)
  for broken, line in (
    ({'returns_BL': given}, 'lacks advantages_BL, which every algorithm reads'),
    ({'advantages_BL': given[1:]}, r'advantages_BL has shape \(5, 16\), expe'),
    ({'advantages_BL': given * np.nan}, 'advantages_BL: not finite in float32'),
    ({'advantages_BL': given > 0}, 'advantages_BL is bool, expected real numb'),
  ):
    batch_file.save(path, broken)
    with pytest.raises(ValueError, match=line):
      load()
