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
def _run(*arrays, name):
  """Returns the loss, and its gradients by the arrays but the mask."""
  *arrays, mask = arrays

  def total(*arrays):
    loss = preferences.preference_loss(
      *arrays, mask, name=name, beta=BETA, alpha=ALPHA
    )
    return loss.total, loss

  gradients, loss = jax.grad(total, (0, 1, 2), has_aux=True)(*arrays)
  return loss, gradients


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
def test_the_loss_and_its_gradients_equal_their_twin(name):
  logprobs, ref, divergence, mask = _pairs()
  found, gradients = _run(logprobs, ref, divergence, mask, name=name)
  assert found.count == P - 1
  expected = _twin(logprobs, ref, divergence, mask, name)
  for x, y in zip(found, expected, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-12)
  of_logprobs, of_ref, of_divergence = gradients
  slots = [(p, side, i) for p in (0, FAILED) for side in (0, 1) for i in (2, 7)]
  slots += [tuple(slot) for slot in np.argwhere(mask)[::7]]
  by_logprobs = lambda x: _twin(x, ref, divergence, mask, name)[0]
  by_divergence = lambda x: _twin(
    logprobs, ref, x, mask, name, frozen=divergence
  )[0]
  for function, x, gradient in (
    (by_logprobs, logprobs, of_logprobs),
    (by_divergence, divergence, of_divergence),
  ):
    expected = twins.differences(function, x, slots)
    for slot in slots:
      assert gradient[slot] == pytest.approx(expected[slot], abs=1e-8)
  assert not np.any(of_ref)


@pytest.mark.parametrize('name', NAMES)
def test_neither_poison_off_the_mask_nor_a_failed_pair_counts(name):
  *arrays, mask = _pairs()
  clean = _run(*arrays, mask, name=name)
  for value in (np.nan, np.inf, -np.inf):
    bad = [np.where(mask, x, value) for x in arrays]
    bad[0][FAILED] = np.nan  # the whole pair
    found = _run(*bad, mask, name=name)
    jax.tree.map(np.testing.assert_array_equal, found, clean)
  for gradient in clean[1]:
    assert not np.any(gradient[FAILED])
  nothing, _ = _run(*arrays, np.zeros_like(mask), name=name)
  assert not any(map(np.any, nothing))


def test_the_loss_of_a_large_margin_is_finite_and_linear():
  logprobs, *rest = _pairs()
  for sign in (-1, 1):
    far = logprobs + 1e4 * np.array([sign, -sign])[None, :, None]
    loss, (gradient, _, _) = _run(far, *rest, name='tdpo1')
    assert np.isfinite(loss.total) and np.all(np.isfinite(gradient))
    assert (loss.total == 0) == (sign == 1)
    assert np.abs(gradient).max() == (0 if sign == 1 else BETA)
