"""Describes the success of a run in a few numbers, and finds a collapse.

The success of a step is the mean outcome reward of its sampled dialogues. The
success is noisy. So the best value, the final value and a collapse are computed
from the running mean over five steps. If a run has fewer than five steps, the
mean is over all of them.
"""

from collections.abc import Sequence
import math
from typing import NamedTuple

import numpy as np

WINDOW = 5  # the number of steps of a running mean
_COLLAPSED = 0.5  # a running mean below this share of the best mean is low


class Curve(NamedTuple):
  """The success of a run in a few numbers.

  Attributes:
    area: the mean success over all steps, which is the area under the curve
      divided by the number of steps.
    best: the largest running mean.
    final: the last running mean.
    collapsed: whether the run ends with five or more running means below half
      of `best`.
    collapsed_at: the number of the last of the five steps over which the first
      of these low means is taken; nan if the run did not collapse.
  """

  area: float
  best: float
  final: float
  collapsed: bool
  collapsed_at: float


def curve(
  success: np.ndarray, steps: Sequence[int] | np.ndarray | None = None
) -> Curve:
  """Returns the `Curve` of a run.

  Args:
    success: the success of each step. Steps whose success is nan are left out.
      If no step is left, all numbers of the result are nan.
    steps: the number of each step; None for 1, 2, 3 and so on.
  """
  numbers = np.arange(1, len(success) + 1) if steps is None else steps
  found = ~np.isnan(success)
  numbers, success = np.asarray(numbers)[found], success[found]
  if not len(success):
    return Curve(math.nan, math.nan, math.nan, False, math.nan)
  window = min(WINDOW, len(success))
  means = np.convolve(success, np.full(window, 1 / window), mode='valid')
  best = int(np.argmax(means))
  # If the best mean is negative, every mean is below half of it, even the best
  # mean. So in this case no mean counts as low.
  is_low = (means[best] > 0) & (means < _COLLAPSED * means[best])
  # A run that recovers has not collapsed, so only low means at the end count.
  stayed = 0
  while stayed < len(means) - 1 - best and is_low[-1 - stayed]:
    stayed += 1
  collapsed = stayed >= WINDOW
  first = len(means) - stayed + window
  return Curve(
    area=float(success.mean()),
    best=float(means[best]),
    final=float(means[-1]),
    collapsed=collapsed,
    collapsed_at=float(numbers[first - 1]) if collapsed else math.nan,
  )
