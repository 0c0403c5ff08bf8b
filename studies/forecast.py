"""Asks which metrics forecast a collapse, in studies that chose no threshold.

    python -m studies.forecast docs/collapse/*.csv.gz

Each metric is the mean of five steps. A metric forecasts a collapse if it is
above a threshold at least five steps before the collapse. It raises a false
alarm if it is above the threshold in any step of a run that does not collapse.
The threshold for a study is the threshold with the largest F1 in all other
studies. The area under the curve needs no threshold. It says how often the
metric is larger 5 to 10 steps before a collapse than in other steps of the same
study; steps after a collapse are left out, and chance is 0.5.

This was written after the runs, whose outcomes had been seen.
"""

from collections.abc import Callable, Mapping, Sequence
import pathlib
import sys

import numpy as np

from stppo_jax.tools import score_report
from stppo_jax.tools import success_curve
from stppo_jax.tools.ablation import results

LEAD, _HORIZON = 5, 10  # the fewest and most steps before a collapse
_QUANTILES = np.linspace(0.3, 0.999, 120)  # the thresholds that are tried
_LEAST = 20  # fewer steps shortly before a collapse give no area
# Returns, for each step of a run, the mean of a metric over the last five
# steps. In the first four steps this is nan.
Signal = Callable[[results.Run], np.ndarray]


def _mean(column: str, *, sign: float = 1.0) -> Signal:
  """Returns the signal of a metric: the mean of a column, times `sign`.

  `sign` is -1 if small values of the metric should forecast a collapse.
  """

  def signal(run: results.Run) -> np.ndarray:
    values = sign * run.per_step(column)
    window = success_curve.WINDOW
    means = np.full(len(values), np.nan)
    # In a step whose returns hardly vary, the explained variance can be below
    # -2,000, which tells nothing. So values are clipped.
    values = np.clip(values, -100, 100)
    means[window - 1 :] = np.convolve(values, np.ones(window) / window, 'valid')
    return means

  return signal


def _fall(run: results.Run) -> np.ndarray:
  """Returns by which share of its best mean so far success has fallen."""
  means = _mean('success')(run)
  best = np.fmax.accumulate(means)
  return np.where(best > 0, 1 - means / np.maximum(best, 1e-9), np.nan)


SIGNALS: Mapping[str, Signal] = {
  'KL to the old policy': _mean('kl_old'),
  'KL to the start': _mean('kl_reference'),
  'cut': _mean('cut'),
  'outside, token': _mean('clip_token'),
  'outside, turn': _mean('clip_turn'),
  'largest turn ratio': _mean('ratio_max_turn'),
  'entropy, large': _mean('entropy'),
  'entropy, small': _mean('entropy', sign=-1.0),
  'explained variance, small': _mean('explained_variance', sign=-1.0),
  '`rho`': _mean('rho'),
  'fall of success': _fall,
}
_HEAD = ('metric', 'precision', 'recall', 'lead', 'false alarms', 'area')


def table(studies: Mapping[str, Sequence[results.Run]]) -> list[list[str]]:
  """Returns a table with a row for each metric.

  Args:
    studies: the runs of each study; no run is in two studies.
  """
  rows: list[list[str]] = [list(_HEAD)]
  for name, signal in SIGNALS.items():
    found = {
      study: [(x, run) for run in runs if not np.isnan(x := signal(run)).all()]
      for study, runs in studies.items()
    }
    leads, counts, areas = [], np.zeros(3, int), []
    for study, pairs in found.items():
      others = [
        x for key, those in found.items() if key != study for x in those
      ]
      tried = np.nanquantile(np.concatenate([x for x, _ in others]), _QUANTILES)
      threshold = max(tried, key=lambda t: _f1(_counts(others, t)[0]))
      count, lead = _counts(pairs, threshold)
      counts, leads = counts + count, leads + lead
      areas += _area(pairs)
    caught, missed, wrong = counts
    healthy = sum(
      not run.curve.collapsed for pairs in found.values() for _, run in pairs
    )
    rows.append(
      [
        name,
        f'{caught / max(caught + wrong, 1):.2f}',
        f'{caught / (caught + missed):.2f}',
        f'{np.median(leads):.0f}' if leads else '',
        f'{wrong}/{healthy}',
        f'{np.mean(areas):.2f} ({min(areas):.2f}..{max(areas):.2f})',
      ]
    )
  return rows


def _counts(pairs, threshold: float) -> tuple[np.ndarray, list[float]]:
  """Returns the counts of a threshold, and the leads of its forecasts.

  The counts are the numbers of collapses that were forecast, collapses that
  were missed, and runs with a false alarm. A lead is the number of steps from a
  forecast to the collapse.

  Args:
    pairs: for each run, the metric in each of its steps, and the run itself.
    threshold: the threshold of the metric.
  """
  counts, leads = np.zeros(3, int), []
  for values, run in pairs:
    rings = 1 + np.flatnonzero(values > threshold)
    if not run.curve.collapsed:
      counts[2] += len(rings) > 0
      continue
    lead = run.curve.collapsed_at - rings[0] if len(rings) else -np.inf
    if lead >= LEAD:
      leads.append(float(lead))
    counts[int(lead < LEAD)] += 1
  return counts, leads


def _f1(counts: np.ndarray) -> float:
  caught, missed, wrong = counts
  return 2 * caught / max(2 * caught + missed + wrong, 1)


def _area(pairs) -> list[float]:
  """Returns a list with the area under the curve of a study.

  The list is empty if the study has too few steps that are 5 to 10 steps before
  a collapse.

  Args:
    pairs: for each run, the metric in each of its steps, and the run itself.
  """
  before, others = [], []
  for values, run in pairs:
    at = run.curve.collapsed_at
    for step, value in enumerate(values, start=1):
      # Without a collapse, `at` is nan, and all comparisons with nan are false.
      if not np.isnan(value) and not step >= at:
        is_near = LEAD <= at - step <= _HORIZON
        (before if is_near else others).append(value)
  if len(before) < _LEAST:
    return []
  others.sort()
  sides = [np.searchsorted(others, before, side) for side in ('left', 'right')]
  return [float(np.mean(sides)) / len(others)]


def of_tables(paths: Sequence[pathlib.Path]) -> list[list[str]]:
  """Returns the table of the studies in files, one study in each file.

  A run that is in several files counts only in the first of these files.
  """
  seen: set[tuple[str, int]] = set()
  studies = {}
  for path in paths:
    runs = [r for r in results.read(path) if (r.settings, r.seed) not in seen]
    seen |= {(run.settings, run.seed) for run in runs}
    studies[path.name] = runs
  return table(studies)


if __name__ == '__main__':
  found = of_tables([pathlib.Path(name) for name in sys.argv[1:]])
  print(score_report.as_markdown(found))
