import jax
import numpy as np
import pytest

from stppo_jax.configs import defaults
from stppo_jax.rl import bounds
from tests.rl import batches

_BAPO = defaults.DEFAULTS['bounds']['balanced']
BOUNDS = bounds.BOUNDS


@jax.jit
def _balanced(ratio, advantages, options):
  context = batches.context(ratio, advantages)
  found = BOUNDS['balanced'].statistics(context, **options)
  return BOUNDS['balanced'].function(context, found, **options)


@pytest.mark.parametrize(
  ('ratio', 'advantages', 'changes', 'expected'),
  [
    # Enough positive terms, here a share of one half, keep the start.
    ([1.0, 1.0], [1.0, -1.0], {}, (0.6, 1.2)),
    # So do none that are negative.
    ([1.0, 3.0], [0.0, 0.0], {}, (0.6, 1.2)),
    ([1.0, 3.0], [1.0, 2.0], {}, (0.6, 1.2)),
    # Without positive terms both bounds move to their limits.
    ([1.0, 1.0], [-1.0, -1.0], {}, (0.9, 3.0)),
    # Raising low enlarges the negative terms below it, so the share only falls,
    # and the limit ends the loop here too.
    ([1.0, 0.1], [0.1, -1.0], {'high_limit': 1.2}, (0.9, 1.2)),
    # The rules of the options refuse a step below the rounding; the loop must
    # end even so.
    ([1.0, 1.0], [-1.0, -1.0], {'high_step': 1e-12}, (0.9, 1.2)),
    # Many steps end exactly at the limit.
    ([1.0, 1.0], [-1.0, -1.0], {'high_step': 0.001}, (0.9, 3.0)),
  ],
)
def test_balanced_bounds_by_hand(ratio, advantages, changes, expected):
  options = _BAPO | changes
  found = _balanced(np.array([ratio]), np.array([advantages]), options)
  rtol = 1e-6 if changes.get('high_step') == 1e-12 else 1e-7
  np.testing.assert_allclose(found, expected, rtol=rtol)
  assert found[1] == expected[1] or expected[1] < 3


_OLD = np.log([[0.5, 0.001, 0.9, 1.0]])


@jax.jit
def _binary_kl(options):
  context = batches.context(np.ones((1, 4)), np.ones((1, 4)), _OLD)
  return BOUNDS['binary_kl'].function(context, (), **options)


def _of_probabilities(**options):
  """Returns the lowest and the highest probabilities that are trusted."""
  return np.exp(_OLD) * np.asarray(_binary_kl(options))


def test_binary_kl_bounds_the_divergence():
  low, high = _of_probabilities(fall=0.1, rise=0.05)
  old = np.exp(_OLD)

  def divergence(new):
    rest = np.log((1 - old + 1e-8) / (1 - new + 1e-8))
    return old * np.log(old / new) + (1 - old) * rest

  # A probability of 0.001 diverges by less than 0.1 however far it falls, and a
  # probability of 1 cannot rise.
  assert low[0, 1] == pytest.approx(0.001 * np.exp(-20)) and high[0, 3] == 1
  np.testing.assert_allclose(divergence(low)[0, [0, 2, 3]], 0.1, rtol=1e-7)
  np.testing.assert_allclose(divergence(high)[0, :3], 0.05, rtol=1e-7)
  assert np.all(low < old) and np.all(high[0, :3] > old[0, :3])


def test_no_divergence_is_no_change():
  low, high = _of_probabilities(fall=0.0, rise=0.0)
  # The divergence is flat at 0, so rounding hides small changes.
  np.testing.assert_allclose(low, np.exp(_OLD), rtol=1e-3)
  np.testing.assert_allclose(high, np.exp(_OLD), rtol=1e-3)
