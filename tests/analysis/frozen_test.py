"""Files of frozen rollouts: what is read, and everything that is refused."""

import io
import os
import zipfile

import numpy as np
import pytest

from stppo_jax import batch as batch_lib
from stppo_jax.analysis import frozen
from tests.analysis import rollout_arrays

_NEEDS = {
  'loss_mask_BL': 'it',
  'turn_ids_BL': 'it',
  'logprobs_BL': 'it',
  'group_ids_B': 'it',
}


def _select(arrays, needs=None, uses=(), dtype=np.float64):
  return frozen.select(arrays, needs or _NEEDS, uses, dtype=dtype)


def _refused(arrays, *lines, **options):
  with pytest.raises(ValueError) as caught:
    _select(arrays, **options)
  found = str(caught.value).splitlines()
  assert len(found) == len(lines)
  for line, start in zip(found, lines):
    assert line.startswith(start), line


def test_a_file_comes_back_as_it_was_saved(tmp_path):
  arrays, *_ = rollout_arrays.arrays()
  path = tmp_path / 'a name without ending'
  frozen.save(path, arrays | {'another': np.zeros(3)})
  assert os.listdir(tmp_path) == [path.name]
  found = frozen.load(path)
  assert found.keys() == arrays.keys()
  for name, array in arrays.items():
    np.testing.assert_array_equal(found[name], array)
    assert found[name].dtype == array.dtype
  with np.load(path, allow_pickle=False) as archive:
    assert 'another' in archive.files


def test_a_save_that_fails_leaves_the_old_file(tmp_path):
  path = tmp_path / 'F.npz'
  frozen.save(path, {'loss_mask_BL': np.ones((1, 2), bool)})
  with pytest.raises(ValueError, match='allow_pickle'):
    frozen.save(path, {'loss_mask_BL': np.array([object()])})
  assert os.listdir(tmp_path) == ['F.npz']
  assert frozen.load(path)['loss_mask_BL'].shape == (1, 2)


def test_every_array_has_its_place_in_a_batch():
  fields = set(batch_lib.TokenBatch.__dataclass_fields__)
  ours = {'logprobs_BL', 'entropy_BL', 'old_values_BL'}
  assert set(frozen.KINDS) == fields | ours


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


@pytest.mark.parametrize(
  'content',
  [
    b'',
    b'no archive',
    b'PK\x03\x04 cut off',
    _zip(loss_mask_BL=b'no array'),
    _zip(loss_mask_BL=_npy(np.ones((2, 2)))[:-4]),
    _zip(loss_mask_BL=_npy(np.array([[None]]), allow_pickle=True)),
    _npy(np.ones((2, 2))),
  ],
)
def test_what_is_no_sound_file_is_one_line(tmp_path, content):
  path = tmp_path / 'F.npz'
  path.write_bytes(content)
  with pytest.raises(ValueError, match='^not a sound npz file [(].*[)]$'):
    frozen.load(path)


def test_objects_under_other_names_are_never_unpacked(tmp_path):
  path = tmp_path / 'F.npz'
  path.write_bytes(
    _zip(
      loss_mask_BL=_npy(np.ones((2, 3), bool)),
      notes=_npy(np.array([{}]), allow_pickle=True),
    )
  )
  assert frozen.load(path).keys() == {'loss_mask_BL'}


@pytest.mark.parametrize(
  ('changes', 'lines'),
  [
    (
      {'logprobs_BL': np.zeros((6, 9)), 'group_ids_B': np.zeros(5, int)},
      [
        'group_ids_B has shape (5,), expected (6,), as loss_mask_BL has',
        'logprobs_BL has shape (6, 9), expected (6, 16), as loss_mask_BL has',
      ],
    ),
    ({'loss_mask_BL': np.zeros(6)}, ['loss_mask_BL has shape (6,), expected']),
    ({'loss_mask_BL': np.zeros((6, 1))}, ['turn_ids_BL has shape (6, 16), ex']),
  ],
)
def test_shapes_that_do_not_fit_are_named(tmp_path, changes, lines):
  arrays, *_ = rollout_arrays.arrays()
  names = ('loss_mask_BL', 'turn_ids_BL', 'logprobs_BL', 'group_ids_B')
  path = tmp_path / 'F.npz'
  kept = {name: arrays[name] for name in names} | changes
  if 'loss_mask_BL' in changes:
    kept = {name: kept[name] for name in names[:2]}
  frozen.save(path, kept)
  with pytest.raises(ValueError) as caught:
    frozen.load(path)
  found = str(caught.value).splitlines()
  assert all(a.startswith(b) for a, b in zip(found, lines, strict=True)), found


def test_a_file_without_any_of_them_lists_them(tmp_path):
  frozen.save(tmp_path / 'F.npz', {'x': np.zeros(3)})
  with pytest.raises(ValueError, match='holds none of tokens_BL, lengths_B, '):
    frozen.load(tmp_path / 'F.npz')


def test_what_is_selected_is_in_the_types_of_the_computation():
  arrays, batch, logprobs, _ = rollout_arrays.arrays()
  arrays['state_ids_BL'] = np.where(batch.loss_mask_BL, 2**40, -(2**50))
  found = _select(arrays, uses=('state_ids_BL', 'old_values_BL'))
  assert found.keys() == {*_NEEDS, 'state_ids_BL', 'old_values_BL'}
  mask = batch.loss_mask_BL
  assert found['loss_mask_BL'].dtype == bool
  np.testing.assert_array_equal(found['loss_mask_BL'], mask)
  np.testing.assert_array_equal(
    found['turn_ids_BL'], np.where(mask, batch.turn_ids_BL, 0)
  )
  for name in ('turn_ids_BL', 'group_ids_B', 'state_ids_BL'):
    assert found[name].dtype == np.int32
  # Equal where they were equal, though not the same numbers.
  np.testing.assert_array_equal(found['group_ids_B'], batch.group_ids_B)
  np.testing.assert_array_equal(found['state_ids_BL'] > 0, mask)
  assert len(np.unique(found['state_ids_BL'][mask])) == 1
  np.testing.assert_array_equal(found['logprobs_BL'][mask], logprobs[mask])
  small = _select(arrays, dtype=np.float32)
  assert small['logprobs_BL'].dtype == np.float32
  assert frozen.num_turns(found) == batch.turn_ids_BL[mask].max()


def test_a_missing_array_is_named_with_its_reader():
  arrays, *_ = rollout_arrays.arrays()
  del arrays['logprobs_BL'], arrays['group_ids_B']
  _refused(
    arrays,
    'lacks logprobs_BL, which it reads',
    'lacks group_ids_B, which it reads',
  )


@pytest.mark.parametrize(
  ('name', 'dtype', 'line'),
  [
    ('turn_ids_BL', float, 'turn_ids_BL is float64, expected integers'),
    ('loss_mask_BL', float, 'loss_mask_BL is float64, expected booleans, or 0'),
    ('logprobs_BL', complex, 'logprobs_BL is complex128, expected real numb'),
    ('group_ids_B', 'U3', 'group_ids_B is <U3, expected integers'),
  ],
)
def test_another_kind_of_number_is_named(name, dtype, line):
  arrays, *_ = rollout_arrays.arrays(poison=0.0)
  arrays[name] = arrays[name].astype(dtype)
  _refused(arrays, line)


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_found_on_the_mask(value):
  arrays, batch, *_ = rollout_arrays.arrays(poison=value)
  _select(arrays)  # off the mask it may be anything
  slots = np.argwhere(batch.loss_mask_BL)
  arrays['logprobs_BL'][tuple(slots[4])] = value
  arrays['logprobs_BL'][tuple(slots[9])] = value
  place = [int(x) for x in slots[4]]
  _refused(
    arrays,
    f'logprobs_BL: not finite in float64; 2 slots, the first at {place}',
  )
  other = {name: x for name, x in _NEEDS.items() if name != 'logprobs_BL'}
  _select(arrays, other)  # nobody reads it


def test_a_number_too_large_for_the_precision_is_told_of():
  arrays, batch, *_ = rollout_arrays.arrays()
  arrays['logprobs_BL'][tuple(np.argwhere(batch.loss_mask_BL)[0])] = -1e300
  _select(arrays)
  _refused(arrays, 'logprobs_BL: not finite in float32; 1', dtype=np.float32)


@pytest.mark.parametrize('number', [0, -1, 17, 2**40])
def test_a_trained_token_needs_the_number_of_a_turn(number):
  arrays, batch, *_ = rollout_arrays.arrays()
  slot = np.argwhere(batch.loss_mask_BL)[3]
  arrays['turn_ids_BL'][tuple(slot)] = number
  _refused(
    arrays,
    'turn_ids_BL: must be in 1..16 where loss_mask_BL is true; 1 slots, the '
    f'first at {[int(x) for x in slot]}',
  )


def test_a_mask_has_two_values():
  arrays, *_ = rollout_arrays.arrays()
  arrays['loss_mask_BL'][2, 3] = 2
  _refused(arrays, 'loss_mask_BL: neither 0 nor 1; 1 slots, the first at [2, 3')


def test_an_empty_batch_gets_a_token_that_counts_nowhere():
  for shape in ((0, 0), (0, 5), (5, 0), (2, 3)):
    arrays = {
      'loss_mask_BL': np.ones(shape, bool),
      'logprobs_BL': np.ones(shape),
      'turn_ids_BL': np.ones(shape, np.int32),
      'group_ids_B': np.ones(shape[0], np.int32),
    }
    found = frozen.nonempty(arrays)
    rows, tokens = max(shape[0], 1), max(shape[1], 1)
    assert found['logprobs_BL'].shape == (rows, tokens)
    assert found['group_ids_B'].shape == (rows,)
    assert found['loss_mask_BL'].sum() == arrays['loss_mask_BL'].sum()
    assert frozen.num_turns(arrays) == 1
