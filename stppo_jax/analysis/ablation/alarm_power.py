"""Counts how often alarms ring before a collapse, and in healthy runs."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stppo_jax.records import success as success_lib


class Rings(NamedTuple):
  """The alarms of a run, and what became of it.

  Attributes:
    curve: its success.
    steps: alarm to the steps in which it rang.
    counts: alarm to the number of steps in which it could ring. An alarm that
      has no number in this run, as that of the critic in a run without one, is
      in neither of the two.
  """

  curve: success_lib.Curve
  steps: Mapping[str, Sequence[float]]
  counts: Mapping[str, int]


_HEAD = (
  'alarm',
  'rang before a collapse',
  'steps before',
  'healthy runs in which it rang',
  'share of their steps',
)


def table(runs: Sequence[Rings], names: Sequence[str]) -> list[list[str]]:
  """Returns a table with a row for each alarm that some run could have."""
  rows: list[list[str]] = [list(_HEAD)]
  for name in names:
    able = [run for run in runs if run.counts.get(name)]
    collapsed = [run for run in able if run.curve.collapsed]
    healthy = [run for run in able if not run.curve.collapsed]
    # In the step of the collapse or earlier.
    leads = [
      run.curve.collapsed_at - min(run.steps[name])
      for run in collapsed
      if len(run.steps[name]) and min(run.steps[name]) <= run.curve.collapsed_at
    ]
    rang = sum(len(run.steps[name]) > 0 for run in healthy)
    shares = [len(run.steps[name]) / run.counts[name] for run in healthy]
    if able:
      rows.append(
        [
          name,
          f'{len(leads)}/{len(collapsed)}',
          f'{np.median(leads):.0f}' if leads else '',
          f'{rang}/{len(healthy)}',
          f'{np.mean(shares):.0%}' if healthy else '',
        ]
      )
  return rows
