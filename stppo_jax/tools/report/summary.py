"""The numbers of a report's tables, each a function of metrics.jsonl.

A step's evaluation score is the mean of its `val/` metrics. "Last" numbers of
training are means over the last ten steps, because single steps are noisy.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import statistics
from typing import Any
from typing import NamedTuple

import numpy as np

from stppo_jax.records import headline
from stppo_jax.tools import success_curve
from stppo_jax.tools.report import comparison
from stppo_jax.tools.report import run_files

_LAST = 10  # steps
_REWARD = 'critic/score/mean'
_EVALUATION = 'val/'  # then the name of the score, then of the data set
LEVELS = ('token', 'turn', 'sentence', 'sequence')
PHASES = (
  'wait',
  'annotate',
  'update',
  'token_details',
  'evaluate',
  'checkpoint',
  'other',
)
_ALARM = 'alarm/'
# Metrics that stand for something that went wrong wherever they are not 0.
_FAULTS = (
  'update/skipped',
  'retrieval/failures',
  'engine/failures',
  'rollout/status/infra_error',
  'writer/sink_errors',
)
_NON_FINITE = 'writer/non_finite'
Pairs = Sequence[tuple[int, float]]


class Line(NamedTuple):
  """A line of the summary.

  Attributes:
    name: what it shows.
    value: its number for a run; None if the run has none.
    digits: digits behind the point.
    note: the explanation that is shown beside it.
  """

  name: str
  value: Callable[[run_files.Run], float | None]
  digits: int
  note: str


class Alarm(NamedTuple):
  """Steps in which a metric said that something was wrong.

  Attributes:
    run: the number of the run.
    name: the metric.
    steps: the steps, in order.
    worst: its largest value; None for values that are not finite.
  """

  run: int
  name: str
  steps: list[int]
  worst: float | None


def lines(runs: Sequence[run_files.Run]) -> list[Line]:
  """Returns the lines of the summary for which some run has a number."""
  return [
    line for line in _LINES if any(line.value(run) is not None for run in runs)
  ]


def evaluations(run: run_files.Run) -> list[tuple[int, float]]:
  """Returns (step, score) of each evaluation."""
  by_step: dict[int, dict[str, float]] = {}
  for name in run.names():
    if name.startswith(_EVALUATION):
      for step, value in run.column(name):
        by_step.setdefault(step, {})[name] = value
  return [
    (step, score)
    for step, metrics in sorted(by_step.items())
    for score in headline.evaluation(metrics).values()
  ]


def collapse_step(run: run_files.Run) -> int | None:
  """Returns the step at which success collapsed; None if it did not."""
  column = run.column(_REWARD)
  curve = success_curve.curve(
    np.array([value for _, value in column]), [step for step, _ in column]
  )
  return int(curve.collapsed_at) if curve.collapsed else None


def spread(values: Sequence[float | None]) -> dict[str, Any] | None:
  """Returns mean, least and largest of the numbers; None without any."""
  numbers = [value for value in values if value is not None]
  if not numbers:
    return None
  return {
    'mean': statistics.fmean(numbers),
    'min': min(numbers),
    'max': max(numbers),
    'count': len(numbers),
  }


def outside_by_turn(run: run_files.Run) -> dict[str, list[list[float]]]:
  """Returns the share of tokens outside the bounds by level and turn.

  Returns:
    Level -> [turn, mean over the steps that have the turn, largest of a step].
  """
  shares: dict[str, list[list[float]]] = {}
  names = run.names()
  for level in LEVELS:
    start = f'clipfrac/{level}/low/turn_'
    turns = sorted(
      int(n.removeprefix(start)) for n in names if n.startswith(start)
    )
    for turn in turns:
      sums = _outside(run, level, f'/turn_{turn}')
      if sums:
        mean = statistics.fmean(sums.values())
        shares.setdefault(level, []).append([turn, mean, max(sums.values())])
  return shares


def outside(run: run_files.Run, level: str) -> dict[int, float]:
  """Returns step -> share of tokens whose ratio is outside the bounds."""
  return _outside(run, level, '')


def phases(run: run_files.Run) -> dict[str, float]:
  """Returns the seconds that each phase took in all steps together."""
  totals = {
    phase: sum(value for _, value in run.column(f'timing_s/{phase}'))
    for phase in PHASES
  }
  return {phase: total for phase, total in totals.items() if total > 0}


def evaluation_table(
  groups: Sequence[comparison.Group],
) -> list[dict[str, Any]]:
  """Returns the last and the best value of each evaluation metric by group."""
  runs = [run for members in groups for run in members.runs]
  names = dict.fromkeys(
    name for run in runs for name in run.names() if name.startswith(_EVALUATION)
  )
  return [
    {
      'name': name,
      'last': [
        spread([_last(run.column(name), 1) for run in members.runs])
        for members in groups
      ],
      'best': [
        spread([_best(run.column(name)) for run in members.runs])
        for members in groups
      ],
    }
    for name in names
  ]


def alarms(runs: Sequence[run_files.Run]) -> list[Alarm]:
  """Returns what went wrong, by run and metric."""
  found = []
  for number, run in enumerate(runs):
    for name in run.names():
      if name.startswith(_ALARM) or name in _FAULTS:
        column = [(step, x) for step, x in run.column(name) if x > 0]
        if column:
          worst = max(value for _, value in column)
          found.append(Alarm(number, name, [step for step, _ in column], worst))
    steps: dict[str, list[int]] = {}
    for line in run.lines:
      for name in _mapping(line.get(_NON_FINITE)):
        steps.setdefault(name, []).append(line['step'])
    found += [
      Alarm(number, f'not finite: {name}', where, None)
      for name, where in steps.items()
    ]
  return found


def _outside(run: run_files.Run, level: str, suffix: str) -> dict[int, float]:
  low = dict(run.column(f'clipfrac/{level}/low{suffix}'))
  high = dict(run.column(f'clipfrac/{level}/high{suffix}'))
  return {step: low[step] + high[step] for step in low if step in high}


def _mapping(value: Any) -> Mapping[str, Any]:
  return value if isinstance(value, dict) else {}


def _last(column: Pairs, count: int) -> float | None:
  values = [value for _, value in column][-count:]
  return statistics.fmean(values) if values else None


def _best(column: Pairs) -> float | None:
  return max((value for _, value in column), default=None)


def _last_of(
  name: str, steps: int = _LAST
) -> Callable[[run_files.Run], float | None]:
  return lambda run: _last(run.column(name), steps)


def _largest_of(name: str) -> Callable[[run_files.Run], float | None]:
  return lambda run: _best(run.column(name))


def _best_step(run: run_files.Run) -> float | None:
  scores = evaluations(run)
  if not scores:
    return None
  return float(max(scores, key=lambda pair: pair[1])[0])


def _steps(run: run_files.Run) -> float:
  return float(run.lines[-1]['step'])


def _collapse(run: run_files.Run) -> float | None:
  step = collapse_step(run)
  return None if step is None else float(step)


def _largest_ratio(run: run_files.Run) -> float | None:
  level = run.recorded.get('algorithm.ratio.level', 'token')
  return _best(run.column(f'ratio/{level}/max'))


def _triggered(run: run_files.Run) -> float | None:
  """Returns the share of steps in which the correction changed the loss."""
  scales = [value for _, value in run.column('stab/scale')]
  if not scales:
    return None
  return sum(value < 1.0 for value in scales) / len(scales)


def _median_seconds(run: run_files.Run) -> float | None:
  seconds = [value for _, value in run.column('timing_s/step')]
  return statistics.median(seconds) if seconds else None


def _hours(run: run_files.Run) -> float | None:
  seconds = [value for _, value in run.column('timing_s/step')]
  seconds += [value for _, value in run.column('timing_s/checkpoint')]
  return sum(seconds) / 3600 if seconds else None


_LINES = (
  Line('steps done', _steps, 0, 'the step of the last line'),
  Line(
    'last evaluation',
    lambda run: _last(evaluations(run), 1),
    3,
    'mean over the evaluation sets, at the last evaluation',
  ),
  Line(
    'best evaluation',
    lambda run: _best(evaluations(run)),
    3,
    'the same at the best one',
  ),
  Line('best at step', _best_step, 0, 'the step of the best evaluation'),
  Line('last reward', _last_of(_REWARD), 3, 'mean of the last ten steps'),
  Line(
    'collapsed at step',
    _collapse,
    0,
    'from here on, every mean over five steps is below half of the best; '
    'there are at least five such means',
  ),
  Line(
    'clipped tokens',
    _last_of('actor/pg_clipfrac'),
    4,
    'share of policy tokens whose gradient is cut, mean of the last ten steps',
  ),
  Line(
    'most clipped tokens',
    _largest_of('actor/pg_clipfrac'),
    4,
    'the same in the worst step',
  ),
  Line(
    'largest ratio',
    _largest_ratio,
    3,
    'the largest ratio of any step, at the level of the algorithm',
  ),
  Line(
    'correction triggered',
    _triggered,
    3,
    'share of steps in which the corrections lowered the weight of tokens',
  ),
  Line('last entropy', _last_of('actor/entropy'), 3, 'nats per policy token'),
  Line(
    'last KL to the reference',
    _last_of('critic/kl'),
    4,
    'nats per policy token, mean of the last ten steps',
  ),
  Line(
    'last explained variance',
    _last_of('critic/vf_explained_var'),
    3,
    'of the value model, mean of the last ten steps',
  ),
  Line('seconds per step', _median_seconds, 2, 'median over the steps'),
  Line('hours', _hours, 2, 'all steps and checkpoints together'),
  Line(
    'goodput',
    _last_of('goodput/fraction', 1),
    3,
    'share of the time since the first start in which the run made steps that '
    'were not lost',
  ),
  Line(
    'steps made again',
    _last_of('goodput/lost_steps', 1),
    0,
    'steps that were lost when the run ended early, and made again',
  ),
)
