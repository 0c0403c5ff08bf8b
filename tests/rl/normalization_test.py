"""By hand; the loop over random batches is in losses_test.py."""

import numpy as np

from stppo_jax.rl import normalization
from tests.rl import batches

# Turns of spread 0.3, 0.1, none at all, and a single token.
LOGS = np.array([[0.5, -0.1, 0.0, 0.3, 0.1, 0.2, 0.2, 0.7]])
TURNS = np.array([[1, 1, 0, 2, 2, 3, 3, 4]], np.int32)
_OPTIONS = {'num_turns': 4, 'implementation': 'auto'}


def _guard(logs):
  batch, _, _ = batches.make()
  batch = batch.replace(turn_ids_BL=TURNS, loss_mask_BL=TURNS > 0)
  guard = normalization.NORMALIZATIONS['guard']
  target = guard.statistics(logs, batch, **_OPTIONS)
  return target, *guard.function(logs, batch, target, **_OPTIONS)


def test_guard_by_hand():
  target, normal, weights = _guard(LOGS)
  np.testing.assert_allclose(target, 0.2)  # of the two that have a spread
  k3 = lambda x: np.exp(x) - 1 - x
  first = np.mean(k3(np.array([0.5, -0.1])))
  second = np.mean(k3(np.array([0.3, 0.1])))
  expected = [
    (0.5 + first) * 2 / 3,
    (-0.1 + first) * 2 / 3,
    0,
    (0.3 + second) * 2,
    (0.1 + second) * 2,
    0.2 + k3(0.2),
    0.2 + k3(0.2),
    0.7 + k3(0.7),
  ]
  np.testing.assert_allclose(normal, [expected], rtol=1e-12)
  np.testing.assert_allclose(
    weights, [[1.5, 1.5, 1, 0.5, 0.5, 1, 1, 1]], rtol=1e-12
  )


def test_guard_gives_turns_one_spread():
  _, normal, _ = _guard(LOGS)
  normal = np.asarray(normal)
  np.testing.assert_allclose(np.std(normal[0, :2]), np.std(normal[0, 3:5]))


def test_at_the_old_policy_guard_does_nothing():
  target, normal, weights = _guard(np.zeros_like(LOGS))
  assert target == 0
  np.testing.assert_array_equal(normal, np.zeros_like(LOGS))
  np.testing.assert_array_equal(weights, np.ones_like(LOGS))


def test_the_scale_is_limited():
  logs = np.where(TURNS == 1, LOGS * 1e-4, LOGS)
  _, _, weights = _guard(logs)
  np.testing.assert_allclose(weights[0, 0], 1 / normalization.GUARD_LIMIT)
