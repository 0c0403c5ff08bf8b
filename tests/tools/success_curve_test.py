"""Best, end and collapse of curves of success, by hand."""

import math

import numpy as np
import pytest

from stppo_jax.tools import success_curve


def test_best_final_and_area_by_hand():
  found = success_curve.curve(np.array([0, 0.2, 0.4, 0.6, 0.8, 1.0, 0.0, 0.0]))
  assert found.area == pytest.approx(3 / 8)
  assert found.best == pytest.approx(0.6)  # of steps 2 to 6
  assert found.final == pytest.approx(0.48)
  assert not found.collapsed and math.isnan(found.collapsed_at)


@pytest.mark.parametrize(
  ('success', 'expected'),
  [
    # Under half of the best from the mean of steps 19 to 23 on.
    ([0.1] * 10 + [0.8] * 10 + [0.0] * 10, 23),
    # It recovers: nothing has collapsed.
    ([0.8] * 10 + [0.0] * 10 + [0.8] * 10, None),
    # It falls in the last steps: whether it stays there is not known.
    ([0.8] * 20 + [0.0] * 5, None),
    # Half of the best is not under half of it.
    ([0.8] * 10 + [0.4] * 20, None),
    # The best comes after the fall.
    ([0.8] * 10 + [0.0] * 10 + [0.9] * 10 + [0.0] * 10, 33),
    # It never learned, or is too short.
    ([0.0] * 20, None),
    ([-1.0] * 20, None),
    ([0.5, 0.0, 0.0], None),
  ],
)
def test_a_collapse_falls_under_half_of_the_best_and_stays(success, expected):
  found = success_curve.curve(np.array(success))
  assert found.collapsed == (expected is not None)
  if expected:
    assert found.collapsed_at == expected


def test_steps_without_success_are_left_out():
  success = np.array([0.1] * 10 + [0.8] * 10 + [0.0] * 10)
  missing = np.insert(success, [3, 25], math.nan)
  found, expected = success_curve.curve(missing), success_curve.curve(success)
  assert found[:4] == expected[:4] and found.collapsed
  # One of the two is before the steps that were low.
  assert found.collapsed_at == expected.collapsed_at + 1
  nothing = success_curve.curve(np.full(3, math.nan))
  assert math.isnan(nothing.area) and not nothing.collapsed


def test_the_collapse_has_the_number_of_its_step():
  success = np.array([0.8] * 10 + [0.0] * 10)
  assert success_curve.curve(success).collapsed_at == 13
  steps = range(101, 121)  # those of a file that lacks the first hundred
  assert success_curve.curve(success, steps).collapsed_at == 113
