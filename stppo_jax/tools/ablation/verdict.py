"""Makes the tables of a study: the success of its arms, and how they differ."""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any

import numpy as np

from stppo_jax.tools import score_report
from stppo_jax.tools.ablation import alarm_tables
from stppo_jax.tools.ablation import results
from stppo_jax.tools.ablation import statistics
from stppo_jax.tools.ablation import study as study_lib

Table = list[list[str]]
_OUTCOMES = (
  'start, greedy',
  'area',
  'best',
  'final',
  'final, greedy',
  'collapsed',
  'median step',
)
# A measure is a column of a run's metrics, a function that reduces the steps of
# the column to one value of the run, and the format of this value.
_Measure = tuple[str, Callable[[np.ndarray], Any], str]
# Maps the heading of a column in the printed table to the column's measure.
_INSIDE: Mapping[str, _Measure] = {
  'outside, token': ('clip_token', np.mean, '.3f'),
  'outside, turn': ('clip_turn', np.mean, '.3f'),
  'outside, sequence': ('clip_sequence', np.mean, '.3f'),
  'cut': ('cut', np.mean, '.3f'),
  'largest token ratio': ('ratio_max_token', np.max, '.3g'),
  'largest turn ratio': ('ratio_max_turn', np.max, '.3g'),
  'spread outside': ('spread_clipped', np.mean, '.2f'),
  'spread inside': ('spread_unclipped', np.mean, '.2f'),
  'corrected': ('scale', statistics.share_below_one, '.2f'),
  'factor': ('scale', np.mean, '.2f'),
  'entropy at the end': ('entropy', statistics.last, '.2f'),
  'KL at the end': ('kl_reference', statistics.last, '.2f'),
  'explained variance': ('explained_variance', np.median, '.2f'),
  'turn length': ('turn_length', np.mean, '.1f'),
}
# The first steps have a table of their own, because most policies have not
# collapsed yet in these steps, and a collapse changes these measures.
_FIRST_STEPS = 5
_AT_FIRST = {
  heading: _INSIDE[heading]
  for heading in (
    'outside, token',
    'outside, turn',
    'outside, sequence',
    'cut',
    'turn length',
  )
}


def tables(
  study: study_lib.Study, runs: Sequence[results.Run]
) -> dict[str, Table]:
  """Returns the tables that compare the arms of a study, by title.

  Args:
    study: the study.
    runs: the finished runs of the study. Arms without a run are left out.
  """
  by_arm: dict[tuple[str, str], list[results.Run]] = {}
  for run in sorted(runs, key=lambda run: run.seed):
    by_arm.setdefault(run.key, []).append(run)
  arms = [arm for arm in study.arms if arm.key in by_arm]
  if not arms:
    return {}
  has_groups = len(study.groups) > 1
  head = ['group'] * has_groups + ['arm', 'seeds']
  outcomes, inside = [[*head, *_OUTCOMES]], [[*head, *_INSIDE]]
  at_first = [[*head, *_AT_FIRST]]
  for arm in arms:
    of_arm = by_arm[arm.key]
    start = [arm.group] * has_groups + [arm.name, str(len(of_arm))]
    outcomes.append(start + _outcomes(of_arm))
    inside.append(start + _inside(of_arm, _INSIDE))
    at_first.append(start + _inside(of_arm, _AT_FIRST, _FIRST_STEPS))
  found = {
    'Success': outcomes,
    'What happened in the updates': inside,
    f'In the first {_FIRST_STEPS} steps': at_first,
  }
  differences = _differences(study, by_arm, has_groups)
  if len(differences) > 1:
    found['Paired differences'] = differences
  return found


def alarms(runs: Sequence[results.Run]) -> dict[str, Table]:
  """Returns {title: the table of the alarms}; {} if no alarm could ring."""
  rings = [alarm_tables.of_table(run) for run in runs]
  table = alarm_tables.table(rings, results.ALARMS)
  return {'Alarms': table} if len(table) > 1 else {}


def _outcomes(runs: Sequence[results.Run]) -> list[str]:
  curves = [run.curve for run in runs]
  greedy = [
    statistics.over_numbers(statistics.last, run.columns['greedy'])
    for run in runs
  ]
  steps = [c.collapsed_at for c in curves if c.collapsed]
  count = len(steps)
  share = statistics.rate(count, len(runs))
  starts = [run.columns['greedy'][0] for run in runs]
  return [
    _estimate(starts),
    _estimate([c.area for c in curves]),
    _estimate([c.best for c in curves]),
    _estimate([c.final for c in curves]),
    _estimate(greedy),
    f'{count}/{len(runs)} ({share.low:.2f}..{share.high:.2f})',
    f'{np.median(steps):.0f}' if steps else '',
  ]


def _inside(
  runs: Sequence[results.Run],
  measures: Mapping[str, _Measure],
  first_steps: int | None = None,
) -> list[str]:
  cells = []
  for column, reduce, form in measures.values():
    columns = [run.per_step(column)[:first_steps] for run in runs]
    values = np.array([statistics.over_numbers(reduce, x) for x in columns])
    value = statistics.over_numbers(np.mean, values)
    # Of the largest ratios of the runs, the median is shown, because one run
    # with a ratio of 1e9 would decide the mean.
    if reduce is np.max:
      value = float(np.median(values))
    cells.append('' if math.isnan(value) else f'{value:{form}}')
  return cells


def _differences(study, by_arm, has_groups) -> Table:
  table = [
    ['group'] * has_groups
    + ['arm', 'minus', 'seeds']
    + ['area', 'area larger', 'area p', 'final', 'final larger', 'final p']
  ]
  # Runs are paired by seed. A seed decides the questions and the sampling of
  # both arms, so most of the noise is common to both and cancels.
  for arm, other in study.pairs():
    # While a study is being made, its arms can have different seeds.
    pairs = statistics.common(
      by_arm.get(arm.key, []), by_arm.get(other.key, [])
    )
    if not pairs:
      continue
    row = [arm.group] * has_groups + [arm.name, other.name, str(len(pairs))]
    for name in ('area', 'final'):
      values, others = (
        [getattr(run.curve, name) for run in runs] for runs in zip(*pairs)
      )
      found = statistics.difference(values, others)
      if math.isnan(found.p):
        row += ['', '', '']
        continue
      row += [
        _interval(found.estimate, found.seeds, '+.2f'),
        f'{found.larger}/{found.seeds}',
        f'{found.p:.3f}' if found.seeds > 1 else '',
      ]
    table.append(row)
  return table


def _estimate(values: Sequence[float]) -> str:
  """Returns a mean as text, with its interval if there are several seeds."""
  if any(map(math.isnan, values)):
    return ''
  return _interval(statistics.mean(values), len(values), '.2f')


def _interval(found: statistics.Estimate, seeds: int, form: str) -> str:
  if seeds == 1:
    return f'{found.mean:{form}}'
  return f'{found.mean:{form}} ({found.low:{form}}..{found.high:{form}})'


def as_text(found: Mapping[str, Table]) -> str:
  """Returns tables with their titles as text, for a terminal."""
  return '\n\n'.join(
    f'{title}\n{score_report.as_text(table)}' for title, table in found.items()
  )


def as_markdown(found: Mapping[str, Table]) -> str:
  """Returns tables with their titles in Markdown."""
  return '\n'.join(
    f'{title}:\n\n{score_report.as_markdown(table)}'
    for title, table in found.items()
  )
