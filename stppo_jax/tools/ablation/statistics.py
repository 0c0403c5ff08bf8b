"""Computes means with 95 % intervals, and differences between arms."""

from collections.abc import Callable, Sequence
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from stppo_jax.tools import score_report
from stppo_jax.tools.ablation import results

# For up to this many paired differences, every combination of signs is tried.
# For more differences, random combinations are drawn, because the number of
# combinations doubles with each difference.
_MAX_EXACT = 12
_DRAWS = 10_000


class Estimate(NamedTuple):
  """A mean or a share over seeds with its 95 % interval."""

  mean: float
  low: float
  high: float


def mean(values: Sequence[float]) -> Estimate:
  """Returns the mean of values with its bootstrap interval over seeds."""
  array = np.asarray(values, np.float64)
  return Estimate(float(array.mean()), *score_report.bootstrap(array))


def rate(count: int, total: int) -> Estimate:
  """Returns the share count / total with its Wilson interval."""
  return Estimate(count / total, *score_report.wilson(count, total))


class Difference(NamedTuple):
  """The paired difference of two arms over the seeds that both arms have.

  Attributes:
    seeds: the number of seeds that both arms have.
    larger: the number of seeds whose difference is positive.
    estimate: the mean difference with its bootstrap interval over seeds.
    p: the two-sided p-value of a sign-flip test: the probability that the mean
      difference would be at least as far from 0 as the observed mean if the
      sign of each seed's difference were random. If there are n seeds and n is
      at most 12, p is at least 2 / 2^n. If the difference of a seed is nan, p
      is nan.
  """

  seeds: int
  larger: int
  estimate: Estimate
  p: float


def difference(values: Sequence[float], others: Sequence[float]) -> Difference:
  """Returns the paired difference: values[i] - others[i] for each seed i."""
  deltas = np.asarray(values, np.float64) - np.asarray(others, np.float64)
  return Difference(
    seeds=len(deltas),
    larger=int((deltas > 0).sum()),
    estimate=mean(deltas.tolist()),
    p=_sign_flip(deltas),
  )


def _sign_flip(deltas: np.ndarray) -> float:
  """Returns the p-value of a sign-flip test; see `Difference`."""
  if np.isnan(deltas).any():  # a comparison with nan is false, so p would be 0
    return math.nan
  if len(deltas) <= _MAX_EXACT:
    signs = np.array(list(itertools.product((1, -1), repeat=len(deltas))))
  else:
    signs = np.random.default_rng(0).choice((1, -1), (_DRAWS, len(deltas)))
    # One draw is the observed combination of signs, so that p is never 0.
    signs[0] = 1
  totals = np.abs(signs @ deltas)
  # The tolerance allows for rounding: sums of the same values in another order
  # can differ slightly.
  return float(np.mean(totals >= abs(deltas.sum()) - 1e-12))


def over_numbers(
  reduce: Callable[[np.ndarray], Any], values: np.ndarray
) -> float:
  """Returns `reduce` of the values that are not nan, or nan if all are nan."""
  found = values[~np.isnan(values)]
  return float(reduce(found)) if len(found) else math.nan


def last(found: np.ndarray) -> float:
  """Returns the last value of an array."""
  return found[-1]


def share_below_one(found: np.ndarray) -> float:
  """Returns the share of the values of an array that are below 1."""
  return (found < 1).mean()


def common(
  runs: Sequence[results.Run], others: Sequence[results.Run]
) -> list[tuple[results.Run, results.Run]]:
  """Returns pairs of runs with the same seed: one run of each of two arms."""
  by_seed = {run.seed: run for run in others}
  return [(run, by_seed[run.seed]) for run in runs if run.seed in by_seed]
