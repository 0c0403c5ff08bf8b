"""Tests limits of corrections; losses_test.py loops over random batches."""

import jax
import numpy as np

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

  @jax.jit
  def correct(batch):
    context = loss_context.LossContext(
      lambda level: RATIO, 'token', np.ones(k.shape), k, k, batch, num_turns=2
    )
    function = corrections.CORRECTIONS[name].function
    return function(context, 0.8, 1.2, (), **options)

  found = correct(batch)
  np.testing.assert_array_equal(found.value_BL, np.ones(k.shape))
  np.testing.assert_array_equal(found.bias_BL, np.zeros(k.shape))
  return np.asarray(found.policy_BL)[0, :3]


_TOKEN = {'level': 'token', 'reduce': 'sum'}
_MEAN = {'level': 'sequence', 'reduce': 'mean'}


def test_on_a_bound_is_inside():
  k = np.ones((1, 4))
  assert all(_weights('mis', k, cap=1.0, **_TOKEN) == 1)
  assert all(_weights('icepop', k, least=1.0, most=1.0, **_TOKEN) == 1)
  assert all(_weights('geo_rs', k, band=0.0, **_MEAN) == 1)
