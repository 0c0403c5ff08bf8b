import math

import jax
import numpy as np
import pytest

from stppo_jax.rl import clipping_bias
from stppo_jax.rl import segments
from tests.rl import batches
from tests.rl import twins

LOW, HIGH = 0.8, 1.2

#                  V    U    U    V    off the mask
RATIO = np.array([[1.0, 2.0, 0.5, 1.1, 9.0]])
ADVANTAGES = np.array([[1.0, 4.0, -8.0, -2.0, 9.0]])
MASK = np.array([[True, True, True, True, False]])


def _sums(ratio=RATIO, advantages=ADVANTAGES, mask=MASK):
  return clipping_bias.batch_sums(ratio, advantages, mask, LOW, HIGH)


def test_a_ratio_on_a_bound_is_inside():
  sums = _sums(ratio=np.array([[LOW, HIGH, LOW - 1e-9, HIGH + 1e-9, 1.0]]))
  assert (sums.clipped_count, sums.kept_count) == (2, 2)


def test_a_scale_with_everything_clipped():
  sums = _sums(ratio=np.full((1, 5), 2.0))
  n_u = 2 * math.sqrt((1 + 16 + 64 + 4) / 4)
  np.testing.assert_allclose(clipping_bias.scale_of(sums, tau=3.0), 1e-8 / n_u)
  np.testing.assert_allclose(
    clipping_bias.scale_of(sums, tau=3.0, kept_empty=1.0),
    (1 + 1e-8) / n_u,
  )


def _loss(batch, logprobs, entropy, **changes):
  algorithm = batches.algorithm('st_ppo', **changes)
  return batches.policy_loss(algorithm, logprobs, entropy, batch)


@pytest.mark.parametrize(
  'implementation',
  [
    pytest.param(form, marks=() if form == 'segment_sum' else pytest.mark.slow)
    for form in segments.IMPLEMENTATIONS
  ],
)
@pytest.mark.parametrize('level', clipping_bias.RATIO_LEVELS)
@pytest.mark.parametrize('scope', clipping_bias.SCOPES)
def test_every_scope_is_the_loop(scope, level, implementation):
  batch, logprobs, entropy = batches.make(spread=0.8)
  # Some turns wholly clipped, some wholly inside.
  logprobs = np.where(
    batch.turn_ids_BL == 2, batch.old_logprobs_BL + 0.5, logprobs
  )
  tau = 1.3
  algorithm = batches.algorithm(
    'st_ppo',
    correction__clipping_bias__scope=scope,
    correction__clipping_bias__level=level,
    correction__clipping_bias__tau=tau,
  )
  with batches.summing(implementation):
    loss = batches.policy_loss(algorithm, logprobs, entropy, batch)
  ratio = twins.ratios(logprobs, batch.old_logprobs_BL, batch, level)
  expected = twins.bias_scales(
    ratio,
    batch.advantages_BL,
    batch,
    scope=scope,
    tau=tau,
    low=LOW,
    high=HIGH,
  )
  assert np.any(expected < 1)
  np.testing.assert_allclose(loss.weights_BL, expected, rtol=1e-12)
  np.testing.assert_array_equal(loss.value_weights_BL, np.ones_like(expected))


def test_applies_to_chooses_the_losses():
  batch, logprobs, entropy = batches.make(spread=0.8)
  key = 'correction__clipping_bias__'
  both = _loss(
    batch,
    logprobs,
    entropy,
    **{key + 'tau': 1e-3, key + 'applies_to': ('policy', 'value')},
  )
  value = _loss(
    batch,
    logprobs,
    entropy,
    **{key + 'tau': 1e-3, key + 'applies_to': ('value',)},
  )
  assert np.any(np.asarray(both.weights_BL) != 1)
  np.testing.assert_array_equal(both.weights_BL, both.value_weights_BL)
  np.testing.assert_array_equal(value.value_weights_BL, both.weights_BL)
  np.testing.assert_array_equal(value.weights_BL, np.ones(both.cut_BL.shape))


@pytest.mark.parametrize('level', clipping_bias.RATIO_LEVELS)
@pytest.mark.parametrize('aggregate', ['token_mean', 'sequence_mean'])
def test_gradient_norm_gives_the_gradient_of_the_clipped_terms(
  level, aggregate
):
  batch, logprobs, entropy = batches.make(spread=0.8)
  mask = batch.loss_mask_BL

  def bias(logprobs):
    return _loss(
      batch,
      logprobs,
      entropy,
      correction__clipping_bias__norm='gradient',
      correction__clipping_bias__level=level,
      aggregate__name=aggregate,
    ).bias

  ratio = twins.ratios(logprobs, batch.old_logprobs_BL, batch, level)
  outside = mask & ((ratio < LOW) | (ratio > HIGH))
  share = np.zeros(mask.shape)
  for b, i in np.argwhere(mask):
    rows = np.any(mask, axis=1).sum()
    share[b, i] = {
      'token_mean': 1 / mask.sum(),
      'sequence_mean': 1 / mask[b].sum() / rows,
    }[aggregate]
  expected = np.where(outside, ratio * batch.advantages_BL * share, 0)
  assert np.any(expected)
  np.testing.assert_allclose(jax.grad(bias)(logprobs), expected, rtol=1e-12)
