import functools
import math

import jax
import numpy as np
import pytest

from stppo_jax.rl import clipping_bias
from tests.rl import batches
from tests.rl import twins

LOW, HIGH = 0.8, 1.2
TAU = 1.3

#                  V    U    U    V    off the mask
RATIO = np.array([[1.0, 2.0, 0.5, 1.1, 9.0]])
ADVANTAGES = np.array([[1.0, 4.0, -8.0, -2.0, 9.0]])
MASK = np.array([[True, True, True, True, False]])


@jax.jit
def _sums(ratio):
  return clipping_bias.batch_sums(ratio, ADVANTAGES, MASK, LOW, HIGH)


def test_a_ratio_on_a_bound_is_inside():
  sums = _sums(np.array([[LOW, HIGH, LOW - 1e-9, HIGH + 1e-9, 1.0]]))
  assert (int(sums.clipped_count), int(sums.kept_count)) == (2, 2)


def test_a_scale_with_everything_clipped():
  sums = _sums(np.full((1, 5), 2.0))
  n_u = 2 * math.sqrt((1 + 16 + 64 + 4) / 4)

  @jax.jit
  def scales(sums):
    scale = functools.partial(clipping_bias.scale_of, sums, tau=3.0)
    return scale(), scale(kept_empty=1.0)

  np.testing.assert_allclose(scales(sums), (1e-8 / n_u, (1 + 1e-8) / n_u))


_KEY = 'correction__clipping_bias__'


def _loss(batch, logprobs, entropy, **changes):
  algorithm = batches.algorithm('st_ppo', **changes)
  return batches.policy_loss(algorithm, logprobs, entropy, batch)


@jax.jit
def _weights(logprobs, entropy, batch):
  """Returns the weights of policy and value by scope and level."""
  weights = {}
  with batches.summing('segment_sum'):
    for scope in clipping_bias.SCOPES:
      for level in clipping_bias.RATIO_LEVELS:
        changes = {'scope': scope, 'level': level, 'tau': TAU}
        changes = {_KEY + name: value for name, value in changes.items()}
        loss = _loss(batch, logprobs, entropy, **changes)
        weights[scope, level] = loss.weights_BL, loss.value_weights_BL
  return weights


@pytest.mark.parametrize('level', clipping_bias.RATIO_LEVELS)
@pytest.mark.parametrize('scope', clipping_bias.SCOPES)
def test_every_scope_is_the_loop(scope, level):
  batch, logprobs, entropy = batches.make(spread=0.8)
  # Some turns wholly clipped, some wholly inside.
  logprobs = np.where(
    batch.turn_ids_BL == 2, batch.old_logprobs_BL + 0.5, logprobs
  )
  weights_BL, value_weights_BL = _weights(logprobs, entropy, batch)[
    scope, level
  ]
  ratio = twins.ratios(logprobs, batch.old_logprobs_BL, batch, level)
  expected = twins.bias_scales(
    ratio,
    batch.advantages_BL,
    batch,
    scope=scope,
    tau=TAU,
    low=LOW,
    high=HIGH,
  )
  assert np.any(expected < 1)
  np.testing.assert_allclose(weights_BL, expected, rtol=1e-12)
  np.testing.assert_array_equal(value_weights_BL, np.ones_like(expected))


def test_applies_to_chooses_the_losses():
  batch, logprobs, entropy = batches.make(spread=0.8)
  both, value = jax.jit(
    lambda *arrays: [
      _loss(*arrays, **{_KEY + 'tau': 1e-3, _KEY + 'applies_to': losses})
      for losses in (('policy', 'value'), ('value',))
    ]
  )(batch, logprobs, entropy)
  assert np.any(np.asarray(both.weights_BL) != 1)
  np.testing.assert_array_equal(both.weights_BL, both.value_weights_BL)
  np.testing.assert_array_equal(value.value_weights_BL, both.weights_BL)
  np.testing.assert_array_equal(value.weights_BL, np.ones(both.cut_BL.shape))


@pytest.mark.parametrize(
  ('level', 'aggregate'), [('token', 'token_mean'), ('turn', 'sequence_mean')]
)
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
  np.testing.assert_allclose(
    jax.jit(jax.grad(bias))(logprobs), expected, rtol=1e-12
  )
