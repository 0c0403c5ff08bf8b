"""By hand; the loop over random batches is in losses_test.py."""

import math

import numpy as np
import pytest

from stppo_jax.rl import corrections
from stppo_jax.rl import loss_context
from tests.rl import batches

K = np.array([[0.25, 1.0, 3.0, 8.0]])
MASK = np.array([[True, True, True, False]])
RATIO = np.array([[2.0, 0.5, 1.0, 1.0]])


def _weights(name, k=K, **options):
  batch, _, _ = batches.make()
  old = np.full(k.shape, -1.0)
  batch = batch.replace(
    loss_mask_BL=MASK,
    turn_ids_BL=MASK.astype(np.int32),
    old_logprobs_BL=old,
    sampler_logprobs_BL=old - np.log(k),
  )
  context = loss_context.LossContext(
    lambda level: RATIO, 'token', np.ones(k.shape), k, batch, num_turns=1
  )
  found = corrections.CORRECTIONS[name].function(
    context, 0.8, 1.2, (), **options
  )
  np.testing.assert_array_equal(found.value_BL, np.ones(k.shape))
  np.testing.assert_array_equal(found.bias_BL, np.zeros(k.shape))
  return np.asarray(found.policy_BL)[0, :3]


_PRODUCT = 0.25 * 1.0 * 3.0


@pytest.mark.parametrize(
  'name,options,expected',
  [
    (
      'tis',
      {'cap': 2.0, 'level': 'token', 'truncated': 'mismatch'},
      [0.25, 1, 2],
    ),
    # min(k r, 0.5) / r
    (
      'tis',
      {'cap': 0.5, 'level': 'token', 'truncated': 'product'},
      [0.25, 1, 0.5],
    ),
    (
      'tis',
      {'cap': 0.5, 'level': 'sequence', 'truncated': 'mismatch'},
      [0.5] * 3,
    ),
    ('mis', {'cap': 2.0, 'level': 'token'}, [0.25, 1, 0]),
    ('mis', {'cap': 2.0, 'level': 'sequence'}, [_PRODUCT] * 3),
    ('mis', {'cap': 0.5, 'level': 'sequence'}, [0] * 3),
    ('icepop', {'least': 0.5, 'most': 5.0}, [0, 1, 3]),
    ('geo_rs', {'band': abs(math.log(_PRODUCT)) / 3 + 1e-9}, [1] * 3),
    ('geo_rs', {'band': abs(math.log(_PRODUCT)) / 3 - 1e-9}, [0] * 3),
  ],
)
def test_corrections_by_hand(name, options, expected):
  np.testing.assert_allclose(_weights(name, **options), expected, rtol=1e-12)


def test_on_a_bound_is_inside():
  k = np.ones((1, 4))
  assert all(_weights('mis', k, cap=1.0, level='token') == 1)
  assert all(_weights('icepop', k, least=1.0, most=1.0) == 1)
  assert all(_weights('geo_rs', k, band=0.0) == 1)


def test_a_missing_array_is_named():
  batch, _, _ = batches.make()
  batch = batch.replace(sampler_logprobs_BL=None)
  context = loss_context.LossContext(
    None, 'token', None, None, batch, num_turns=1
  )
  with pytest.raises(ValueError, match='needs sampler_logprobs_BL'):
    context.log_mismatch('token')
