"""Describes the success of a run in a few numbers, and finds a collapse.

Success is the mean outcome reward of a step's sampled dialogues. It is noisy,
so best, final and collapse are read off its means of five steps.
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
    area: its mean over all steps, the area under the curve per step.
    best: the largest mean of five steps.
    final: the mean of the last five steps.
    collapsed: whether, from some step to the end and for at least five steps,
      the mean of five steps stays below half of its best.
    collapsed_at: the last step of the first of those means; nan if it did not
      collapse.
  """

  area: float
  best: float
  final: float
  collapsed: bool
  collapsed_at: float


def curve(
  success: np.ndarray, steps: Sequence[int] | np.ndarray | None = None
) -> Curve:
  """Returns a curve of success in a few numbers.

  Args:
    success: the success of each step. Steps that are nan are left out; without
      another one, all numbers of the result are nan.
    steps: the numbers of the steps; None: 1, 2, and so on.
  """
  numbers = np.arange(1, len(success) + 1) if steps is None else steps
  found = ~np.isnan(success)
  numbers, success = np.asarray(numbers)[found], success[found]
  if not len(success):
    return Curve(math.nan, math.nan, math.nan, False, math.nan)
  window = min(WINDOW, len(success))
  means = np.convolve(success, np.full(window, 1 / window), mode='valid')
  best = int(np.argmax(means))
  # Half of a best mean that is negative would be above it.
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
