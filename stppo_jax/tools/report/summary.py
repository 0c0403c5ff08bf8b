"""Computes the values in a report's tables from metrics.jsonl.

The evaluation score of a step is the mean of the step's `val/` metrics. The
"last" value of a training metric is a mean over the last ten steps, because
single steps are noisy.
"""

from collections.abc import Callable, Mapping, Sequence
import statistics
from typing import Any, NamedTuple

from stppo_jax.records import headline
from stppo_jax.tools.report import comparison
from stppo_jax.tools.report import run_files
from stppo_jax.training import alarms as alarms_lib

_LAST = 10  # the number of steps whose mean is a "last" value
_EVALUATION = 'val/'  # the prefix of metrics named val/SCORE/DATA_SET
_TOKENS = 'turn_length/tokens/turn_'
LEVELS = ('token', 'turn', 'sentence', 'sequence')
PHASES = (
  'wait annotate update token_details evaluate checkpoint other'
).split()
# Metrics that are above 0 only if something went wrong.
_FAULTS = (
  'update/skipped',
  'retrieval/failures',
  'engine/failures',
  'rollout/status/infra_error',
  'writer/sink_errors',
)
_NON_FINITE = 'writer/non_finite'


class Line(NamedTuple):
  """A line of the summary.

  Attributes:
    name: the name of the value that the line shows.
    value: a function that returns the value of a run, or None if the run has no
      such value.
    digits: the number of decimal places.
    note: the explanation that is shown beside the name.
  """

  name: str
  value: Callable[[run_files.Run], float | None]
  digits: int
  note: str


class Alarm(NamedTuple):
  """The steps in which a metric of a run showed that something was wrong.

  Attributes:
    run: the index of the run.
    name: the name of the metric.
    steps: the steps, in order.
    worst: the largest value of the metric; None if the fault is that the values
      are not finite.
  """

  run: int
  name: str
  steps: list[int]
  worst: float | None


def lines(runs: Sequence[run_files.Run]) -> list[Line]:
  """Returns the lines of the summary that have a value for at least one run."""
  return [
    line for line in _LINES if any(line.value(run) is not None for run in runs)
  ]


def spread(values: Sequence[float | None]) -> dict[str, Any] | None:
  """Returns mean, min, max and count of values; None if all values are None.

  Values that are None are left out.
  """
  numbers = [value for value in values if value is not None]
  if not numbers:
    return None
  return {
    'mean': statistics.fmean(numbers),
    'min': min(numbers),
    'max': max(numbers),
    'count': len(numbers),
  }


def text(spread: Mapping[str, Any] | None, digits: int) -> str:
  """Returns a spread as text, such as 0.5 [0.4, 0.6]."""
  if spread is None:
    return '–'
  mean = f'{spread["mean"]:.{digits}f}'
  if spread['count'] == 1:
    return mean
  return f'{mean} [{spread["min"]:.{digits}f}, {spread["max"]:.{digits}f}]'


def rows(contents: Mapping[str, Any]) -> list[list[str]]:
  """Returns the summary as rows of texts: a name, and a spread of each group.

  Args:
    contents: the result of `page.contents`.
  """
  return [
    [row['name'], *(text(x, row['digits']) for x in row['groups'])]
    for row in contents['summary']
  ]


def outside_by_turn(run: run_files.Run) -> dict[str, list[list[float]]]:
  """Returns, by level and turn, the share of tokens outside the bounds.

  Returns:
    For each level of the ratio, a list [turn, share, tokens] for each turn. The
    share is over the tokens of all steps, and `tokens` is their number. Runs of
    earlier versions did not record the number of tokens. For these runs the
    share is the mean over the steps, and the number is 0.
  """
  shares: dict[str, list[list[float]]] = {}
  for level in LEVELS:
    start = f'{run_files.OUTSIDE}{level}/turn_'
    by_turn = {
      int(name.removeprefix(start)): column
      for name, column in run.columns.items()
      if name.startswith(start)
    }
    if by_turn:
      shares[level] = [
        [turn, *_weighted(column, run.column(f'{_TOKENS}{turn}'))]
        for turn, column in sorted(by_turn.items())
      ]
  return shares


def _weighted(
  shares: Mapping[int, float], tokens: Mapping[int, float]
) -> tuple[float, float]:
  """Returns the weighted mean of the steps' shares, and the number of tokens.

  Args:
    shares: the share of tokens outside the bounds, by step.
    tokens: the number of tokens, by step, which is the weight of the step.
  """
  # A late turn occurs in few dialogues of some steps, and in many dialogues of
  # other steps. These other steps must count more.
  counts = [tokens[step] if step in tokens else 0.0 for step in shares]
  # Runs of earlier versions did not record the number of tokens. Their steps
  # have equal weights.
  total = sum(counts)
  if not total:
    return statistics.fmean(shares.values()), 0.0
  outside = sum(x * n for x, n in zip(shares.values(), counts))
  return outside / total, total


def phases(run: run_files.Run) -> dict[str, float]:
  """Returns the seconds of each phase, summed over all steps."""
  totals = {
    phase: sum(run.column(f'timing_s/{phase}').values()) for phase in PHASES
  }
  return {phase: total for phase, total in totals.items() if total > 0}


def evaluation_table(
  groups: Sequence[comparison.Group],
) -> list[dict[str, Any]]:
  """Returns the last and the best value of each evaluation metric.

  Each value is a spread over the runs of a group.
  """
  runs = [run for members in groups for run in members.runs]
  names = dict.fromkeys(
    name for run in runs for name in run.columns if name.startswith(_EVALUATION)
  )
  return [
    {
      'name': name,
      'last': [
        spread([_last(run.column(name)) for run in members.runs])
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
  """Returns the alarms, faults and non-finite values of each run and metric."""
  found = []
  for number, run in enumerate(runs):
    for name, column in run.columns.items():
      if name.startswith(alarms_lib.PREFIX) or name in _FAULTS:
        if where := [step for step, x in column.items() if x > 0]:
          found.append(Alarm(number, name, where, max(column.values())))
    steps: dict[str, list[int]] = {}
    for line in run.lines:
      names = line.get(_NON_FINITE)
      for name in names if isinstance(names, dict) else ():
        steps.setdefault(name, []).append(line['step'])
    found += [
      Alarm(number, f'not finite: {name}', where, None)
      for name, where in steps.items()
    ]
  return found


def _last(column: Mapping[int, float], count: int = 1) -> float | None:
  values = list(column.values())[-count:]
  return statistics.fmean(values) if values else None


def _best(column: Mapping[int, float]) -> float | None:
  return max(column.values(), default=None)


def _last_of(
  name: str, steps: int = _LAST
) -> Callable[[run_files.Run], float | None]:
  return lambda run: _last(run.column(name), steps)


def _evaluations(run: run_files.Run) -> dict[int, float]:
  """Returns the score of each evaluation of a run, by step."""
  by_step: dict[int, dict[str, float]] = {}
  for name, column in run.columns.items():
    if name.startswith(_EVALUATION):
      for step, value in column.items():
        by_step.setdefault(step, {})[name] = value
  return {
    step: score
    for step, metrics in sorted(by_step.items())
    for score in headline.evaluation(metrics).values()
  }


def _best_step(run: run_files.Run) -> float | None:
  scores = _evaluations(run)
  return max(scores, key=lambda step: scores[step], default=None)


def _largest_ratio(run: run_files.Run) -> float | None:
  # The ratios of all levels are recorded, but the objective clips only the
  # ratio of this level.
  level = run.recorded.get('algorithm.ratio.level', 'token')
  return _best(run.column(f'ratio/{level}/max'))


def _triggered(run: run_files.Run) -> float | None:
  """Returns the share of steps in which corrections lowered loss weights."""
  scales = run.column('stab/scale').values()
  return statistics.fmean(x < 1.0 for x in scales) if scales else None


def _median_seconds(run: run_files.Run) -> float | None:
  # Step 0 is left out, because it is the evaluation before training.
  found = [headline.seconds(line) for line in run.lines if line['step']]
  seconds = [x for x in found if x is not None]
  return statistics.median(seconds) if seconds else None


def _hours(run: run_files.Run) -> float | None:
  names = ('timing_s/step', 'timing_s/checkpoint')
  seconds = [x for name in names for x in run.column(name).values()]
  return sum(seconds) / 3600 if seconds else None


_LINES = (
  Line(
    'steps done',
    lambda run: run.lines[-1]['step'],
    0,
    'the step of the last line',
  ),
  Line(
    'last evaluation',
    lambda run: _last(_evaluations(run)),
    3,
    'mean over the evaluation sets, at the last evaluation',
  ),
  Line(
    'best evaluation',
    lambda run: _best(_evaluations(run)),
    3,
    'mean over the evaluation sets, at the best evaluation',
  ),
  Line('best at step', _best_step, 0, 'the step of the best evaluation'),
  Line(
    'last reward', _last_of(run_files.REWARD), 3, 'mean of the last ten steps'
  ),
  Line(
    'collapsed at step',
    lambda run: run.curve.collapsed_at if run.curve.collapsed else None,
    0,
    'from this step on, every mean over five steps is below half of the best; '
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
    lambda run: _best(run.column('actor/pg_clipfrac')),
    4,
    'share of policy tokens whose gradient is cut, in the worst step',
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
    # Goodput and the number of steps made again are totals since the first
    # start. So their newest values are shown, and not means over steps.
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
