"""Counts how often alarms ring before a collapse, and in healthy runs."""

from collections.abc import Iterable, Mapping, Sequence
import pathlib
from typing import NamedTuple

import numpy as np

from stppo_jax import buckets
from stppo_jax import exits
from stppo_jax.configs import alarms as thresholds_lib
from stppo_jax.tools import run_state
from stppo_jax.tools import score_report
from stppo_jax.tools import success_curve
from stppo_jax.tools.ablation import results
from stppo_jax.tools.report import run_files
from stppo_jax.training import alarms as alarms_lib
from stppo_jax.workdir import bucket_files
from stppo_jax.workdir import run_folder

# Maps the name of a metric to the column of a study's table that has the values
# of the metric.
_COLUMNS = {
  metrics[0]: column
  for column, metrics in results.METRICS.items()
  if len(metrics) == 1
}
# The alarms whose metric is a column of a study's table, so that any threshold
# can be tried. For every other alarm, a table has at most the steps in which
# the alarm rang.
MEASURED = tuple(
  name
  for name, alarm in alarms_lib.ALARMS.items()
  if alarm.number(dict.fromkeys(_COLUMNS, 0.0)) is not None
)


class Rings(NamedTuple):
  """The success of a run, and the steps in which its alarms rang.

  An alarm whose metric the run never has, such as `explained_variance` in a run
  without a value model, is in neither `steps` nor `counts`.

  Attributes:
    curve: the success of the run in a few numbers.
    steps: maps the name of an alarm to the steps in which the alarm rang.
    counts: maps the name of an alarm to the number of steps that have the
      alarm's metric. Only in these steps could the alarm ring.
  """

  curve: success_curve.Curve
  steps: Mapping[str, Sequence[float]]
  counts: Mapping[str, int]


def is_table(name: str) -> bool:
  """Returns whether a path names the table of a study, a CSV file."""
  return name.endswith(('.csv', '.csv.gz'))


def show(names: Sequence[str], thresholds: Mapping[str, float]) -> list[str]:
  """Prints a table of how often each alarm rang in some runs.

  A run that neither finished nor collapsed is left out. If no run is left, no
  table is printed.

  Args:
    names: the paths of tables of studies, of folders of runs, or of folders
      that contain folders of runs.
    thresholds: maps the name of an alarm to the threshold that replaces its
      threshold in `configs/alarms.py`.

  Returns:
    One message for each table, folder, file or line that could not be read.
  """
  runs, losses = _of_tables(filter(is_table, names), thresholds)
  folders = [name for name in names if not is_table(name)]
  for folder in dict.fromkeys(x for name in folders for x in _folders(name)):
    try:
      with bucket_files.downloaded(folder) as path:
        run = run_files.read(str(path), folder)
    except (exits.Misconfigured, buckets.BucketError) as error:
      losses.append(str(error))
      continue
    losses += run.losses
    rings = _of_run(run, thresholds_lib.section() | dict(thresholds))
    # A run that ended early without a collapse might have collapsed later, so
    # it counts neither as collapsed nor as healthy.
    if run.state.state == run_state.FINISHED or rings.curve.collapsed:
      runs.append(rings)
    else:
      print(f'{folder}: left out: the run neither finished nor collapsed')
  if runs:
    print(f'{title(runs)}\n')
    print(score_report.as_text(table(runs, list(alarms_lib.ALARMS))))
  return losses


def _of_tables(
  tables: Iterable[str], thresholds: Mapping[str, float]
) -> tuple[list[Rings], list[str]]:
  """Returns the `Rings` of the runs in tables, and a message per bad table."""
  runs: list[results.Run] = []
  losses = []
  for name in dict.fromkeys(tables):
    try:
      if not pathlib.Path(name).is_file():
        raise exits.Misconfigured(f'{name}: no such file')
      runs += results.read(pathlib.Path(name))
    except exits.Misconfigured as error:
      losses.append(str(error))
  return [of_table(run, thresholds) for run in results.distinct(runs)], losses


def _folders(name: str) -> list[str]:
  """Returns the folders of the runs inside the folder `name`.

  If `name` is itself the folder of a run, or has no runs, [name] is returned.
  """
  path = pathlib.Path(name)
  if (path / run_folder.METRICS).exists() or not path.is_dir():
    return [name]
  found = sorted(x.parent for x in path.glob(f'*/{run_folder.METRICS}'))
  # The folder of a study also contains runs of `sft`, its supervised starts.
  runs = [str(x) for x in found if run_folder.command_of(x) != 'sft']
  return runs or [name]


def _of_run(run: run_files.Run, thresholds: Mapping[str, float]) -> Rings:
  """Returns the `Rings` of a run, computed with the given thresholds."""
  steps: dict[str, list[float]] = {}
  counts: dict[str, int] = {}
  for line in run.lines:
    numbers = {k: v for k, v in line.items() if run_files.is_number(v)}
    for name, rings in alarms_lib.check(numbers, thresholds).items():
      counts[name] = counts.get(name, 0) + 1
      steps.setdefault(name, []).extend([line['step']] * rings)
  return Rings(run.curve, steps, counts)


def of_table(
  run: results.Run, thresholds: Mapping[str, float] | None = None
) -> Rings:
  """Returns the `Rings` of a run that was read from the table of a study.

  Args:
    run: the run that was read from the table.
    thresholds: maps names of alarms of `MEASURED` to the thresholds to try.
      For every other alarm, the result has the steps in which the alarm rang
      during the run, with the threshold of the run's config.
  """
  rang = {name: run.per_step(f'alarm_{name}') for name in results.ALARMS}
  for name, threshold in (thresholds or {}).items():
    rang[name] = _rang(run, name, threshold)
  # An alarm whose metric the run never has could not ring, so it is left out
  # and not counted as silent.
  rang = {name: x for name, x in rang.items() if not np.isnan(x).all()}
  return Rings(
    curve=run.curve,
    # Index i of an array belongs to step i + 1.
    steps={n: (1.0 + np.flatnonzero(x == 1)).tolist() for n, x in rang.items()},
    counts={n: int((~np.isnan(x)).sum()) for n, x in rang.items()},
  )


def _rang(run: results.Run, name: str, threshold: float) -> np.ndarray:
  """Returns an array with 1 for each step in which an alarm rings.

  The array has 0 for a step in which the alarm does not ring, and nan for a
  step without the alarm's metric.

  Args:
    run: the run that was read from a table.
    name: the name of the alarm, one of `MEASURED`.
    threshold: the threshold of the alarm.
  """
  # The other alarms get the threshold nan, so they never ring.
  thresholds = dict.fromkeys(alarms_lib.ALARMS, float('nan'))
  thresholds[name] = threshold
  columns = {metric: run.per_step(x) for metric, x in _COLUMNS.items()}
  return np.array(
    [
      alarms_lib.check(dict(zip(columns, numbers)), thresholds).get(
        name, float('nan')
      )
      for numbers in zip(*columns.values())
    ]
  )


def title(runs: Sequence[Rings]) -> str:
  """Returns a title with the number of runs and how many of them collapsed."""
  collapsed = sum(run.curve.collapsed for run in runs)
  return f'{len(runs)} run{"s" * (len(runs) != 1)}, {collapsed} collapsed'


_HEAD = (
  'alarm',
  'rang before a collapse',
  'steps before',
  'healthy runs in which it rang',
  'share of their steps',
)


def table(runs: Sequence[Rings], names: Sequence[str]) -> list[list[str]]:
  """Returns a table with a row for each alarm that could ring in some run."""
  rows: list[list[str]] = [list(_HEAD)]
  for name in names:
    able = [run for run in runs if run.counts.get(name)]
    collapsed = [run for run in able if run.curve.collapsed]
    healthy = [run for run in able if not run.curve.collapsed]
    # The number of steps from the first ring to the collapse, for each run in
    # which the alarm rang no later than in the step of the collapse.
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
