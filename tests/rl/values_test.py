"""The value loss and its categorical targets equal loops over tokens."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.rl import values as values_lib
from tests.rl import batches
from tests.rl import twins


def _same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@jax.jit
def _value_loss(values, old, returns, mask, **options):
  return values_lib.value_loss(values, old, returns, mask, clip=0.5, **options)


@pytest.mark.parametrize('bounds', [None, (-4.0, 4.0), (0.0, 1.0)])
def test_value_loss_is_its_twin_and_masks_hold(bounds):
  batch, _, _ = batches.make()
  mask = batch.loss_mask_BL
  rng = np.random.default_rng(1)
  values = batch.values_BL + rng.normal(size=mask.shape)
  options = {} if bounds is None else {'bounds': bounds}
  weights = np.abs(rng.normal(size=mask.shape))

  def distance(value, target):
    if bounds is None:
      return 0.5 * (value - target) ** 2
    low, high = bounds
    p, q = ((x - low) / (high - low) for x in (value, target))
    p, q = (min(max(x, 0.0), 1.0) for x in (p, q))
    p = 1e-6 + (1 - 2e-6) * p
    return -q * math.log(p) - (1 - q) * math.log(1 - p)

  def twin(values, clip=0.5):
    total, clipped = 0.0, 0
    for b, i in twins.policy_tokens(mask):
      v, old = values[b, i], batch.values_BL[b, i]
      target = batch.returns_BL[b, i]
      near = min(max(v, old - clip), old + clip)
      plain, other = distance(v, target), distance(near, target)
      clipped += other > plain
      total += weights[b, i] * max(plain, other)
    return total, clipped

  def total(values, old, returns):
    loss = _value_loss(
      values, old, returns, mask, weights_BL=weights, **options
    )
    return loss.total, loss

  run = jax.value_and_grad(total, has_aux=True)
  arrays = (values, batch.values_BL, batch.returns_BL)
  found = run(*arrays)
  (value, loss), gradient = found
  expected, clipped = twin(values)
  np.testing.assert_allclose(value, expected, rtol=1e-12)
  assert (loss.count, loss.clipped) == (mask.sum(), clipped)
  np.testing.assert_allclose(
    gradient,
    twins.differences(lambda x: twin(x)[0], values, np.argwhere(mask)),
    rtol=1e-6,
    atol=1e-8,
  )
  for poison in (np.nan, np.inf):
    _same(run(*(batches.poison_array(x, mask, poison) for x in arrays)), found)
  assert tuple(_value_loss(*arrays, np.zeros_like(mask))) == (0, 0, 0)
  without = _value_loss(
    values, None, batch.returns_BL, mask, weights_BL=weights, **options
  )
  assert without.clipped == 0 < clipped
  expected, _ = twin(values, np.inf)
  np.testing.assert_allclose(without.total, expected, rtol=1e-12)


@jax.jit
def _categorical_loss(logits_BLY, old, returns, mask, weights):
  logprobs_BLY = jax.nn.log_softmax(logits_BLY)
  centres = np.linspace(-1, 2, logits_BLY.shape[-1])[None, None]
  return values_lib.value_loss(
    jnp.sum(jnp.exp(logprobs_BLY) * centres, axis=-1),
    old,
    returns,
    mask,
    clip=0.2,
    weights_BL=weights,
    bounds=(-1.0, 2.0),
    logprobs_BLY=logprobs_BLY,
  )


def test_a_categorical_loss_and_its_gradient_are_their_twins():
  count = 7
  batch, _, _ = batches.make()
  mask = batch.loss_mask_BL
  rng = np.random.default_rng(2)
  logits = rng.normal(size=(*mask.shape, count))
  old = rng.uniform(-1, 2, size=mask.shape)
  returns = rng.uniform(-2, 3, size=mask.shape)  # some are out of the range
  weights = np.abs(rng.normal(size=mask.shape))
  centres = [-1 + 3 * k / (count - 1) for k in range(count)]

  total, clipped, gradient = 0.0, 0, np.zeros(logits.shape)
  for b, i in twins.policy_tokens(mask):
    p = np.exp(logits[b, i]) / np.exp(logits[b, i]).sum()
    target = np.zeros(count)
    goal = min(max(returns[b, i], -1.0), 2.0)
    left = max(k for k in range(count - 1) if centres[k] <= goal)
    target[left + 1] = (goal - centres[left]) / (centres[1] - centres[0])
    target[left] = 1 - target[left + 1]
    total -= weights[b, i] * (target * np.log(p)).sum()
    value = (p * centres).sum()
    near = min(max(value, old[b, i] - 0.2), old[b, i] + 0.2)
    if abs(near - returns[b, i]) > abs(value - returns[b, i]):
      clipped += 1
    else:
      gradient[b, i] = weights[b, i] * (p - target)
  assert 0 < clipped < mask.sum()

  def loss_of(logits, old, returns):
    loss = _categorical_loss(logits, old, returns, mask, weights)
    return loss.total, loss

  run = jax.value_and_grad(loss_of, has_aux=True)
  (value, loss), found = run(logits, old, returns)
  np.testing.assert_allclose(value, total, rtol=1e-12)
  np.testing.assert_allclose(found, gradient, atol=1e-12)
  assert (loss.count, loss.clipped) == (mask.sum(), clipped)
  poisoned = [batches.poison_array(x, mask, np.nan) for x in (old, returns)]
  _same(run(logits, *poisoned), ((value, loss), found))


def test_two_hot_targets_have_the_mean_of_their_numbers():
  x_BL = np.array([[-5.0, -1.0, 0.0, 0.25, 1.999, 2.0, 9.0]])
  two_hot = jax.jit(values_lib.two_hot, static_argnums=(1, 2))
  target_BLY = np.asarray(two_hot(x_BL, (-1.0, 2.0), 4))
  np.testing.assert_allclose(
    target_BLY @ [-1.0, 0.0, 1.0, 2.0], np.clip(x_BL, -1, 2), rtol=1e-12
  )
  np.testing.assert_allclose(target_BLY.sum(axis=-1), 1, rtol=1e-12)
  np.testing.assert_array_equal(
    (target_BLY > 0).sum(axis=-1), [[1, 1, 1, 2, 2, 1, 1]]
  )
