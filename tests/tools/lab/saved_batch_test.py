"""Saved batches: the arrays that are selected, and those refused."""

import math

import numpy as np
import pytest

from stppo_jax import batch as batch_lib
from stppo_jax.tools.lab import saved_batch
from tests.tools.lab import batch_arrays

_NEEDS = dict.fromkeys(
  ('loss_mask_BL', 'turn_ids_BL', 'logprobs_BL', 'group_ids_B'), 'it'
)


def _select(arrays, needs=None, dtype=np.float64):
  return saved_batch.select(arrays, needs or _NEEDS, dtype=dtype)


def _refused(arrays, *lines, **options):
  with pytest.raises(ValueError) as caught:
    _select(arrays, **options)
  found = str(caught.value).splitlines()
  assert len(found) == len(lines)
  for line, start in zip(found, lines):
    assert line.startswith(start), line


def test_every_array_has_its_place_in_a_batch():
  fields = set(batch_lib.TokenBatch.__dataclass_fields__)
  ours = {'logprobs_BL', 'entropy_BL', 'old_values_BL', 'kl_coefficient'}
  of_models = {'loss_positions_BM', 'expert_ids', 'expert_visits_BX', 'packing'}
  # The lab forms z from rewards, and collects with one policy.
  formed = {'turn_z_BL', 'staleness_BL'}
  ours |= {f'oracle_{x}_BL' for x in ('values', 'variances', 'counts')}
  assert set(saved_batch.ARRAY_KINDS) == fields - of_models - formed | ours


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
    ({'loss_mask_BL': np.zeros(6, int)}, ['loss_mask_BL has shape (6,), exp']),
    (
      {'loss_mask_BL': np.zeros((6, 1), int)},
      ['turn_ids_BL has shape (6, 16), ex'],
    ),
  ],
)
def test_shapes_that_do_not_fit_are_named(changes, lines):
  arrays, *_ = batch_arrays.arrays()
  needs = _NEEDS
  if 'loss_mask_BL' in changes:
    needs = dict.fromkeys(('loss_mask_BL', 'turn_ids_BL'), 'it')
  _refused(arrays | changes, *lines, needs=needs)
  _select(arrays | {'advantages_BL': np.zeros(3)})  # not read by the command


def test_selected_arrays_have_the_dtypes_of_the_computation():
  arrays, batch, logprobs, _ = batch_arrays.arrays()
  arrays['state_ids_BL'] = np.where(batch.loss_mask_BL, 2**40, -(2**50))
  more = dict.fromkeys(('state_ids_BL', 'old_values_BL'), 'it')
  found = _select(arrays, _NEEDS | more)
  assert found.keys() == _NEEDS.keys() | more.keys()
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
  assert saved_batch.num_turns(found) == batch.turn_ids_BL[mask].max()


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
  arrays, *_ = batch_arrays.arrays(poison=0.0)
  arrays[name] = arrays[name].astype(dtype)
  _refused(arrays, line)


@pytest.mark.parametrize('value', [np.nan, -np.inf])
def test_a_number_that_is_not_finite_is_found_on_the_mask(value):
  arrays, batch, *_ = batch_arrays.arrays(poison=value)
  _select(arrays)  # off the mask it may be anything
  slots = np.argwhere(batch.loss_mask_BL)
  arrays['logprobs_BL'][tuple(slots[4])] = value
  arrays['logprobs_BL'][tuple(slots[9])] = value
  where = f'2 entries, the first at {slots[4].tolist()}'
  _refused(arrays, f'logprobs_BL: not finite in float64; {where}')
  other = {name: x for name, x in _NEEDS.items() if name != 'logprobs_BL'}
  _select(arrays, other)  # not read by the command


def test_a_number_too_large_for_the_precision_is_refused():
  arrays, batch, *_ = batch_arrays.arrays()
  arrays['logprobs_BL'][tuple(np.argwhere(batch.loss_mask_BL)[0])] = -1e300
  _select(arrays)
  _refused(arrays, 'logprobs_BL: not finite in float32; 1', dtype=np.float32)


@pytest.mark.parametrize('number', [0, -1, 17, 2**40])
def test_a_trained_token_needs_a_turn_id(number):
  arrays, batch, *_ = batch_arrays.arrays()
  slot = np.argwhere(batch.loss_mask_BL)[3]
  arrays['turn_ids_BL'][tuple(slot)] = number
  line = 'turn_ids_BL: must be in 1..16 where loss_mask_BL is true; 1 entries, '
  _refused(arrays, f'{line}the first at {slot.tolist()}')


def test_a_single_number_has_no_axes():
  arrays, *_ = batch_arrays.arrays()
  needs = _NEEDS | {'kl_coefficient': 'it'}
  arrays['kl_coefficient'] = np.asarray(0.25)
  found = _select(arrays, needs)
  assert found['kl_coefficient'] == 0.25
  assert saved_batch.token_batch(found | {'rewards_BL': None})
  for value, line in (
    (math.nan, 'kl_coefficient: not finite in float64'),
    ([0.25], 'kl_coefficient has shape (1,), expected (), as loss_mask_BL'),
    ('high', 'kl_coefficient is <U4, expected real numbers'),
  ):
    arrays['kl_coefficient'] = np.asarray(value)
    _refused(arrays, line, needs=needs)
