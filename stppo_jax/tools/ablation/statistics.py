"""Computes intervals and paired differences of the arms of a study."""

from collections.abc import Callable, Sequence
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from stppo_jax.tools import score_report
from stppo_jax.tools.ablation import results

# For up to so many differences, every combination of signs is tried; for more
# of them, combinations are drawn, because their number doubles with each.
_MAX_EXACT = 12
_DRAWS = 10_000


class Estimate(NamedTuple):
  """A mean over seeds with its 95 % interval."""

  mean: float
  low: float
  high: float


def mean(values: Sequence[float]) -> Estimate:
  """Returns a mean with its percentile bootstrap interval over seeds."""
  array = np.asarray(values, np.float64)
  return Estimate(float(array.mean()), *score_report.bootstrap(array))


def rate(count: int, total: int) -> Estimate:
  """Returns a share with its Wilson interval."""
  return Estimate(count / total, *score_report.wilson(count, total))


class Difference(NamedTuple):
  """A difference of two arms over the seeds that both have.

  Attributes:
    seeds: the number of these seeds.
    larger: the number of them in which it is positive.
    estimate: its mean with the bootstrap interval over seeds.
    p: the probability of a mean this far from 0, on either side, if the sign
      of each seed's difference were random; with n seeds at least 2 / 2^n.
      It is nan if a difference is.
  """

  seeds: int
  larger: int
  estimate: Estimate
  p: float


def difference(values: Sequence[float], others: Sequence[float]) -> Difference:
  """Returns the difference of samples: values[i] is paired with others[i]."""
  deltas = np.asarray(values, np.float64) - np.asarray(others, np.float64)
  return Difference(
    seeds=len(deltas),
    larger=int((deltas > 0).sum()),
    estimate=mean(deltas.tolist()),
    p=_sign_flip(deltas),
  )


def _sign_flip(deltas: np.ndarray) -> float:
  """Returns the p-value of a mean of differences; see `Difference`."""
  if np.isnan(deltas).any():  # all comparisons with nan are false: p were 0
    return math.nan
  if len(deltas) <= _MAX_EXACT:
    signs = np.array(list(itertools.product((1, -1), repeat=len(deltas))))
  else:
    signs = np.random.default_rng(0).choice((1, -1), (_DRAWS, len(deltas)))
    # The signs that were observed are one of the draws, so that p is never 0.
    signs[0] = 1
  totals = np.abs(signs @ deltas)
  # Sums of the same numbers in another order differ by rounding.
  return float(np.mean(totals >= abs(deltas.sum()) - 1e-12))


def over_numbers(
  reduce: Callable[[np.ndarray], Any], values: np.ndarray
) -> float:
  """Reduces the values that are not nan to one number; nan if all are nan."""
  found = values[~np.isnan(values)]
  return float(reduce(found)) if len(found) else math.nan


def last(found: np.ndarray) -> float:
  """Returns the last number."""
  return found[-1]


def share_below_one(found: np.ndarray) -> float:
  """Returns the share of the numbers that are below 1."""
  return (found < 1).mean()


def common(
  runs: Sequence[results.Run], others: Sequence[results.Run]
) -> list[tuple[results.Run, results.Run]]:
  """Returns the pairs of runs of two arms that have the same seed."""
  by_seed = {run.seed: run for run in others}
  return [(run, by_seed[run.seed]) for run in runs if run.seed in by_seed]
