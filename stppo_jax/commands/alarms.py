"""Say which alarms rang in runs, and how long before a collapse.

python -m stppo_jax alarms RUNS... [--ALARM=THRESHOLD ...]

  RUNS  the folder of a run of train, a folder of such folders (the workdir of a
        study or a sweep), the address of the copy of a run, its
        writer.copy_to, or FILE.csv, the table of a study

The thresholds are those of configs/alarms.py. Give others to see when the
alarms would have rung with them:

  --repetition          the largest share of repeated text
  --entropy             the least entropy of the policy, in nats
  --turn_ratio          the largest ratio of a turn
  --zero_variance       the largest share of groups without variance
  --explained_variance  the least explained variance of the values
  --empty_answers       the largest share of searches that find nothing
  --finish_ratio        the least share of trajectories with an answer
  --search_rate         the least number of searches per trajectory
  --kl                  the largest divergence from the reference, in nats
  --infrastructure      the largest share of trajectories that fail

Success is averaged over five steps. A run has collapsed if, from some step to
the end and for at least five steps, this mean stays below half of its best
(docs/collapse.md). A finished run that has not collapsed is healthy; a run that
has neither finished nor collapsed is left out.

The alarms are computed from the metrics that were written, so nothing is
trained. A table has the metrics of entropy, turn_ratio, explained_variance and
kl. For the other alarms it only says when they rang, with the thresholds of the
run. What cannot be read is named in one line, and the exit code is then 2.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import math
import pathlib
import sys

import numpy as np

from stppo_jax import buckets
from stppo_jax import exits
from stppo_jax import settings
from stppo_jax.configs import alarms as thresholds_lib
from stppo_jax.records import success
from stppo_jax.tools import run_state
from stppo_jax.tools import score_report
from stppo_jax.tools.ablation import alarm_power
from stppo_jax.tools.ablation import results
from stppo_jax.tools.report import run_files
from stppo_jax.training import alarms as alarms_lib
from stppo_jax.workdir import bucket_copy
from stppo_jax.workdir import run_folder

_REWARD = 'critic/score/mean'


def main(argv: Sequence[str]) -> int:
  """Prints what the alarms are worth; returns the exit code."""
  words = [word for word in argv if not word.startswith('-')]
  tables = [word for word in words if word.endswith('.csv')]
  given, problems = _thresholds([word for word in argv if word.startswith('-')])
  if not words:
    problems.append('RUNS: missing; give the folder of a run, or several')
  if tables:
    problems += [
      f'--{name}: no table of a study has its number; give the folders of runs'
      for name in given
      if name not in alarm_power.MEASURED
    ]
  if problems:
    print('\n'.join(problems), file=sys.stderr)
    return exits.USAGE
  runs, losses = _of_tables(tables, given)
  section = thresholds_lib.section()
  thresholds = {name: section[name] for name in thresholds_lib.THRESHOLDS}
  thresholds |= given
  folders = [word for word in words if word not in tables]
  for folder in dict.fromkeys(x for name in folders for x in _runs(name)):
    try:
      with bucket_copy.downloaded(folder) as path:
        run = run_files.read(str(path), folder)
    except (run_files.Unreadable, buckets.BucketError) as error:
      losses.append(str(error))
      continue
    losses += run.losses
    rings = _rings(run, thresholds)
    if run.state.state == run_state.FINISHED or rings.curve.collapsed:
      runs.append(rings)
    else:
      print(f'{folder}: left out: it has not finished, nor collapsed')
  if runs:
    print(f'{alarm_power.title(runs)}\n')
    rows = alarm_power.table(runs, list(alarms_lib.ALARMS))
    print(score_report.as_text(rows))
  for loss in losses:
    print(loss, file=sys.stderr)
  return 2 if losses else 0


def _thresholds(words: Sequence[str]) -> tuple[dict[str, float], list[str]]:
  """Returns the thresholds that flags give, and what is wrong with them."""
  thresholds: dict[str, float] = {}
  problems = []
  names = thresholds_lib.THRESHOLDS
  for word in words:
    flag, _, text = word.partition('=')
    name = flag.removeprefix('--')
    if name not in names or flag == name:
      hint = settings.closest(flag, [f'--{name}' for name in names])
      problems.append(f'{word}: unknown flag{hint}')
      continue
    try:
      thresholds[name] = float(text)
    except ValueError:
      thresholds[name] = math.nan
    if math.isnan(thresholds[name]):
      problems.append(f'{word}: must be a number, such as --kl=2.5')
  return thresholds, problems


def _of_tables(
  tables: Sequence[str], thresholds: Mapping[str, float]
) -> tuple[list[alarm_power.Rings], list[str]]:
  """Returns the alarms of the runs of tables, and what cannot be read."""
  runs: list[results.Run] = []
  losses = []
  for table in dict.fromkeys(tables):
    path = pathlib.Path(table)
    try:
      if not path.is_file():
        raise results.BadTable(f'{table}: no such file')
      runs += results.read(path)
    except results.BadTable as error:
      losses.append(str(error))
  rings = [alarm_power.of_table(x, thresholds) for x in results.distinct(runs)]
  return rings, losses


def _runs(folder: str) -> list[str]:
  """Returns the folders of runs in a folder of folders, or itself."""
  path = pathlib.Path(folder)
  if (path / 'metrics.jsonl').exists() or not path.is_dir():
    return [folder]
  found = sorted(x.parent for x in path.glob('*/metrics.jsonl'))
  # A study has its supervised starts beside its runs.
  return [str(x) for x in found if run_folder.command_of(x) != 'sft'] or [
    folder
  ]


def _rings(run: run_files.Run, thresholds: dict[str, float]):
  """Returns the alarms of a run with these thresholds."""
  column = run.column(_REWARD)
  curve = success.curve(
    np.array([value for _, value in column]), [step for step, _ in column]
  )
  steps: dict[str, list[float]] = {}
  counts: dict[str, int] = {}
  for line in run.lines:
    numbers = {k: v for k, v in line.items() if run_files.is_number(v)}
    for name, rings in alarms_lib.check(numbers, thresholds).items():
      counts[name] = counts.get(name, 0) + 1
      steps.setdefault(name, []).extend([line['step']] * rings)
  return alarm_power.Rings(curve, steps, counts)
