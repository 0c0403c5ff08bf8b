"""Describes the success of a run in a few numbers, and finds a collapse.

Success is the mean outcome reward of a step's sampled dialogues. It is noisy,
so the best value, the final value and a collapse are read off its running mean
over five steps. If a run has fewer steps, the mean is over all of them.
"""

from collections.abc import Sequence
import math
from typing import NamedTuple

import numpy as np

WINDOW = 5  # steps
_COLLAPSED = 0.5  # share of the best mean


class Curve(NamedTuple):
  """The success of a run in a few numbers.

  Attributes:
    area: the mean success over all steps, which is the area under the curve
      per step.
    best: the largest running mean.
    final: the last running mean.
    collapsed: whether at least the last five running means are below half of
      `best`.
    collapsed_at: the last step of the window of the first of these low means;
      nan if the run did not collapse.
  """

  area: float
  best: float
  final: float
  collapsed: bool
  collapsed_at: float


def curve(
  success: np.ndarray, steps: Sequence[int] | np.ndarray | None = None
) -> Curve:
  """Returns the `Curve` that describes the success of each step.

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
  # If the best mean is negative, half of it is larger than every mean. Then no
  # mean counts as low.
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
