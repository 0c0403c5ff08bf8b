"""TDPO on pairs: its twin, its gradient, identities, and poison."""

import functools
import math

import jax
import numpy as np
import pytest

from stppo_jax.rl import preferences
from tests.rl import twins

P, L = 5, 12
FAILED = 3  # the pair whose dispreferred trajectory has no token
BETA, ALPHA = 0.3, 0.4
NAMES = tuple(preferences.PREFERENCES)


def _pairs(seed=0, spread=0.5):
  """Returns log-probabilities, those of the reference, divergence and mask."""
  rng = np.random.default_rng(seed)
  draw = lambda: rng.normal(size=(P, 2, L))
  mask = rng.random((P, 2, L)) < 0.6
  mask[FAILED, 1] = False
  logprobs = -np.abs(draw())
  return logprobs, logprobs + spread * draw(), np.abs(draw()), mask


@functools.partial(jax.jit, static_argnames='name')
def _loss(*arrays, name, beta=BETA, alpha=ALPHA):
  return preferences.preference_loss(*arrays, name=name, beta=beta, alpha=alpha)


def _twin(logprobs, ref, divergence, mask, name, frozen=None):
  """Returns the fields of `PreferenceLoss`, computed by loops.

  `frozen` gives the divergences behind the stop-gradient of tdpo2.
  """
  total = count = margin = correct = 0
  log_ratios, divergences = np.zeros((2, 2))
  for p in range(P):
    if not all(mask[p, side].any() for side in (0, 1)):
      continue
    ratio, kl, held = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
    for side in (0, 1):
      for i in range(L):
        if mask[p, side, i]:
          ratio[side] += logprobs[p, side, i] - ref[p, side, i]
          kl[side] += divergence[p, side, i]
          behind = divergence if frozen is None else frozen
          held[side] += behind[p, side, i]
    u = ratio[0] - ratio[1]
    if name == 'tdpo1':
      shift = kl[1] - kl[0]
    else:
      shift = ALPHA * (kl[1] - held[0])
    total += -math.log(1 / (1 + math.exp(-BETA * (u - shift))))
    count += 1
    margin += BETA * u
    correct += u > 0
    log_ratios += ratio
    divergences += kl
  return total, count, margin, correct, log_ratios, divergences


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('seed', [0, 1])
def test_the_loss_equals_its_twin(name, seed):
  arrays = _pairs(seed)
  found = _loss(*arrays, name=name)
  assert found.count == P - 1
  for x, expected in zip(found, _twin(*arrays, name), strict=True):
    np.testing.assert_allclose(x, expected, rtol=1e-12)


@pytest.mark.parametrize('name', NAMES)
def test_the_gradient_is_that_of_finite_differences(name):
  logprobs, ref, divergence, mask = _pairs()
  total = lambda *arrays: _loss(*arrays, mask, name=name).total
  of_logprobs, of_ref, of_divergence = jax.grad(total, (0, 1, 2))(
    logprobs, ref, divergence
  )
  slots = [(p, side, i) for p in (0, FAILED) for side in (0, 1) for i in (2, 7)]
  slots += [tuple(slot) for slot in np.argwhere(mask)[::7]]
  expected = twins.differences(
    lambda x: _twin(x, ref, divergence, mask, name)[0], logprobs, slots
  )
  for slot in slots:
    assert of_logprobs[slot] == pytest.approx(expected[slot], abs=1e-8)
  expected = twins.differences(
    lambda x: _twin(logprobs, ref, x, mask, name, frozen=divergence)[0],
    divergence,
    slots,
  )
  for slot in slots:
    assert of_divergence[slot] == pytest.approx(expected[slot], abs=1e-8)
  assert not np.any(of_ref)


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_poison_off_the_mask_changes_nothing(name, value):
  *arrays, mask = _pairs()
  bad = [np.where(mask, x, value) for x in arrays]
  total = lambda *arrays: _loss(*arrays, mask, name=name).total
  for x, expected in zip(
    _loss(*bad, mask, name=name), _loss(*arrays, mask, name=name), strict=True
  ):
    np.testing.assert_array_equal(x, expected)
  for g, expected in zip(
    jax.grad(total, (0, 1, 2))(*bad),
    jax.grad(total, (0, 1, 2))(*arrays),
    strict=True,
  ):
    np.testing.assert_array_equal(g, expected)


@pytest.mark.parametrize('name', NAMES)
def test_a_failed_pair_changes_nothing(name):
  arrays = list(_pairs())
  # Its other trajectory changes nothing either.
  arrays[0][FAILED, 0] = np.nan
  there = np.arange(P) != FAILED
  found = _loss(*arrays, name=name)
  without = _loss(*(x[there] for x in arrays), name=name)
  for x, expected in zip(found, without, strict=True):
    np.testing.assert_allclose(x, expected, rtol=1e-12)
  gradient = jax.grad(lambda x: _loss(x, *arrays[1:], name=name).total)
  assert not np.any(gradient(arrays[0])[FAILED])


def test_without_pairs_all_sums_are_0():
  *arrays, mask = _pairs()
  found = _loss(*arrays, np.zeros_like(mask), name='tdpo2')
  assert not any(np.any(x) for x in found)


def test_the_loss_of_a_large_margin_is_finite_and_linear():
  logprobs, ref, divergence, mask = _pairs()
  for sign in (-1, 1):
    far = logprobs + 1e4 * np.array([sign, -sign])[None, :, None]
    total = lambda x: _loss(x, ref, divergence, mask, name='tdpo1').total
    value, gradient = jax.value_and_grad(total)(far)
    assert np.isfinite(value) and np.all(np.isfinite(gradient))
    assert (value == 0) == (sign == 1)
    assert np.abs(gradient).max() == (0 if sign == 1 else BETA)
