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
    turn_ids_BL=np.array([[1, 1, 2, 0]]),
    old_logprobs_BL=old,
    sampler_logprobs_BL=old - np.log(k),
  )
  context = loss_context.LossContext(
    lambda level: RATIO, 'token', np.ones(k.shape), k, k, batch, num_turns=2
  )
  found = corrections.CORRECTIONS[name].function(
    context, 0.8, 1.2, (), **options
  )
  np.testing.assert_array_equal(found.value_BL, np.ones(k.shape))
  np.testing.assert_array_equal(found.bias_BL, np.zeros(k.shape))
  return np.asarray(found.policy_BL)[0, :3]


_PRODUCT = 0.25 * 1.0 * 3.0


_TOKEN = {'level': 'token', 'reduce': 'sum'}
_TURN_SUM = {'level': 'turn', 'reduce': 'sum'}
_TURN_MEAN = {'level': 'turn', 'reduce': 'mean'}
_SUM = {'level': 'sequence', 'reduce': 'sum'}
_MEAN = {'level': 'sequence', 'reduce': 'mean'}
_K = {'truncated': 'mismatch'}


# k is 1/4 and 1 in the first turn, 3 in the second.
@pytest.mark.parametrize(
  'name,options,expected',
  [
    ('tis', {'cap': 2.0, **_TOKEN, **_K}, [0.25, 1, 2]),
    # min(k r, 0.5) / r
    ('tis', {'cap': 0.5, **_TOKEN, 'truncated': 'product'}, [0.25, 1, 0.5]),
    ('tis', {'cap': 0.5, **_SUM, **_K}, [0.5] * 3),
    ('tis', {'cap': 2.0, **_TURN_SUM, **_K}, [0.25, 0.25, 2]),
    ('tis', {'cap': 2.0, **_TURN_MEAN, **_K}, [0.5, 0.5, 2]),
    ('mis', {'cap': 2.0, **_TOKEN}, [0.25, 1, 0]),
    ('mis', {'cap': 2.0, **_SUM}, [_PRODUCT] * 3),
    ('mis', {'cap': 0.5, **_SUM}, [0] * 3),
    ('mis', {'cap': 2.0, **_TURN_MEAN}, [0.5, 0.5, 0]),
    ('mis', {'cap': 2.0, **_MEAN}, [_PRODUCT ** (1 / 3)] * 3),
    ('icepop', {'least': 0.5, 'most': 5.0, **_TOKEN}, [0, 1, 3]),
    ('icepop', {'least': 0.4, 'most': 2.0, **_TURN_MEAN}, [0.5, 0.5, 0]),
    ('icepop', {'least': 0.4, 'most': 5.0, **_TURN_SUM}, [0, 0, 3]),
    ('geo_rs', {'band': abs(math.log(_PRODUCT)) / 3 + 1e-9, **_MEAN}, [1] * 3),
    ('geo_rs', {'band': abs(math.log(_PRODUCT)) / 3 - 1e-9, **_MEAN}, [0] * 3),
    ('geo_rs', {'band': math.log(2) + 1e-9, **_TURN_MEAN}, [1, 1, 0]),
    ('geo_rs', {'band': math.log(2) + 1e-9, **_TURN_SUM}, [0, 0, 0]),
  ],
)
def test_corrections_by_hand(name, options, expected):
  np.testing.assert_allclose(_weights(name, **options), expected, rtol=1e-12)


def test_on_a_bound_is_inside():
  k = np.ones((1, 4))
  assert all(_weights('mis', k, cap=1.0, **_TOKEN) == 1)
  assert all(_weights('icepop', k, least=1.0, most=1.0, **_TOKEN) == 1)
  assert all(_weights('geo_rs', k, band=0.0, **_MEAN) == 1)


def test_a_missing_array_is_named():
  batch, _, _ = batches.make()
  batch = batch.replace(sampler_logprobs_BL=None)
  context = loss_context.LossContext(
    None, 'token', None, None, None, batch, num_turns=1
  )
  with pytest.raises(ValueError, match='needs sampler_logprobs_BL'):
    context.log_mismatch('token', 'sum')


def test_a_product_over_a_long_dialogue_vanishes_and_its_mean_does_not():
  # 50 turns of 40 tokens; log k is -2e-3 at every second token.
  turns = np.repeat(np.arange(1, 51), 40)[None]
  log_k = np.where(np.arange(2000) % 2, -2e-3, 0.0)[None]
  batch, _, _ = batches.make()
  batch = batch.replace(
    loss_mask_BL=turns > 0,
    turn_ids_BL=turns,
    old_logprobs_BL=log_k,
    sampler_logprobs_BL=np.zeros(turns.shape),
  )
  context = loss_context.LossContext(
    None, 'token', None, None, None, batch, num_turns=50
  )
  k = {
    (level, reduce): float(np.exp(context.log_mismatch(level, reduce)[0, 0]))
    for level in ('turn', 'sequence')
    for reduce in ('mean', 'sum')
  }
  assert k == pytest.approx(
    {
      ('turn', 'mean'): np.exp(-1e-3),
      ('turn', 'sum'): np.exp(-0.04),
      ('sequence', 'mean'): np.exp(-1e-3),
      ('sequence', 'sum'): np.exp(-2.0),
    }
  )
