import math

import jax
import jax.numpy as jnp
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
N_U = math.sqrt((8.0**2 + 4.0**2) / 2)
N_V = math.sqrt((1.0**2 + 2.2**2) / 2)


def _sums(ratio=RATIO, advantages=ADVANTAGES, mask=MASK):
  return clipping_bias.batch_sums(ratio, advantages, mask, LOW, HIGH)


def test_sums_norms_and_scale_by_hand():
  sums = _sums()
  np.testing.assert_allclose(sums, [80.0, 2.0, 5.84, 2.0])
  np.testing.assert_allclose(clipping_bias.norms(sums), (N_U, N_V))
  rho = N_U / (N_V + 1e-8)
  assert 3 < rho < 5
  np.testing.assert_allclose(clipping_bias.rho_of(sums), rho)
  np.testing.assert_allclose(clipping_bias.scale_of(sums, tau=3.0), 1 / rho)
  assert clipping_bias.scale_of(sums, tau=5.0) == 1
  assert clipping_bias.scale_of(sums, tau=math.inf) == 1


def test_a_ratio_on_a_bound_is_inside():
  sums = _sums(ratio=np.array([[LOW, HIGH, LOW - 1e-9, HIGH + 1e-9, 1.0]]))
  assert (sums.clipped_count, sums.kept_count) == (2, 2)


def test_nothing_clipped_scales_by_one():
  sums = _sums(ratio=np.ones((1, 5)))
  assert clipping_bias.rho_of(sums) == 0
  assert clipping_bias.scale_of(sums, tau=1e-6) == 1


def test_no_tokens_scale_by_one():
  sums = _sums(mask=np.zeros_like(MASK))
  assert clipping_bias.scale_of(sums, tau=3.0) == 1


def test_a_scale_with_everything_clipped():
  sums = _sums(ratio=np.full((1, 5), 2.0))
  n_u = 2 * math.sqrt((1 + 16 + 64 + 4) / 4)
  np.testing.assert_allclose(clipping_bias.scale_of(sums, tau=3.0), 1e-8 / n_u)
  np.testing.assert_allclose(
    clipping_bias.scale_of(sums, tau=3.0, kept_empty=1.0),
    (1 + 1e-8) / n_u,
  )


def test_gradient_scale_never_enlarges_below_its_floor():
  assert clipping_bias.gradient_scale(jnp.asarray(4.0), floor=1.0) == 0.25
  assert clipping_bias.gradient_scale(jnp.asarray(0.1), floor=1.0) == 1
  assert clipping_bias.gradient_scale(jnp.asarray(0.1), floor=0.5) == 2


def test_sums_of_microbatches_add_up_to_those_of_the_batch():
  batch, logprobs, _ = batches.make()
  ratio = np.exp(logprobs - batch.old_logprobs_BL)

  def sums(index):
    return _sums(
      ratio[index], batch.advantages_BL[index], batch.loss_mask_BL[index]
    )

  by_microbatch = [sums(slice(i, i + 2)) for i in range(0, batches.B, 2)]
  merged = jax.tree.map(lambda *x: sum(x), *by_microbatch)
  np.testing.assert_allclose(merged, sums(slice(None)), rtol=1e-13)


def _loss(batch, logprobs, entropy, **changes):
  algorithm = batches.algorithm('st_ppo', **changes)
  return batches.policy_loss(algorithm, logprobs, entropy, batch)


@pytest.mark.parametrize('implementation', segments.IMPLEMENTATIONS)
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
  loss = batches.policy_loss(
    algorithm,
    logprobs,
    entropy,
    batch,
    implementation=implementation,
  )
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


def test_no_gradient_flows_through_the_scale():
  batch, logprobs, _ = batches.make(spread=0.8)
  mask = batch.loss_mask_BL

  def scale(logprobs, advantages):
    ratio = jnp.exp(logprobs - batch.old_logprobs_BL)
    sums = clipping_bias.batch_sums(ratio, advantages, mask, LOW, HIGH)
    return clipping_bias.scale_of(sums, tau=1e-3)

  assert scale(logprobs, batch.advantages_BL) != 1
  by_logprobs, by_advantages = jax.grad(scale, argnums=(0, 1))(
    logprobs, batch.advantages_BL
  )
  assert not np.any(by_logprobs) and not np.any(by_advantages)
  by_sums = jax.grad(lambda sums: clipping_bias.scale_of(sums, tau=3.0))(
    _sums()
  )
  assert not np.any(by_sums)


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
