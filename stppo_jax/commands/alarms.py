"""Say which alarms rang in runs, and how long before a collapse.

python -m stppo_jax alarms DIR... [--ALARM=THRESHOLD ...]

  DIR  the folder of a run of train, or a folder of such folders, such as the
       workdir of a study or a sweep

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

A run has collapsed if its success fell under half of its best and stayed there
(docs/collapse.md). A finished run that has not collapsed is healthy; a run that
has neither finished nor collapsed is left out. The alarms are computed from the
metrics that were written, so nothing is trained. What cannot be read is named
in one line, and the exit code is then 2.
"""

from collections.abc import Sequence
import math
import pathlib
import sys

import numpy as np

from stppo_jax import settings
from stppo_jax.analysis import score_report
from stppo_jax.analysis.ablation import alarm_power
from stppo_jax.configs import alarms as thresholds_lib
from stppo_jax.records import alarms as alarms_lib
from stppo_jax.records import run_state
from stppo_jax.records import success
from stppo_jax.report import run_files

_REWARD = 'critic/score/mean'


def main(argv: Sequence[str]) -> int:
  """Prints what the alarms are worth; returns the exit code."""
  folders = [word for word in argv if not word.startswith('-')]
  thresholds, problems = _thresholds(
    [word for word in argv if word.startswith('-')]
  )
  if not folders:
    problems.append('DIR: missing; give the folder of a run, or several')
  if problems:
    print('\n'.join(problems), file=sys.stderr)
    return 2
  runs, losses = [], []
  for folder in dict.fromkeys(x for name in folders for x in _runs(name)):
    try:
      run = run_files.read(folder)
    except run_files.Unreadable as error:
      losses.append(str(error))
      continue
    losses += run.losses
    rings = _rings(run, thresholds)
    if run.state.state == run_state.FINISHED or rings.curve.collapsed:
      runs.append(rings)
    else:
      print(f'{folder}: left out: it has not finished, nor collapsed')
  if runs:
    collapsed = sum(run.curve.collapsed for run in runs)
    print(f'{len(runs)} runs, {collapsed} of them collapsed\n')
    rows = alarm_power.table(runs, list(alarms_lib.ALARMS))
    print(score_report.as_text(rows))
  for loss in losses:
    print(loss, file=sys.stderr)
  return 2 if losses else 0


def _thresholds(words: Sequence[str]) -> tuple[dict[str, float], list[str]]:
  """Returns the threshold of each alarm, and what is wrong with the flags."""
  section = thresholds_lib.section()
  thresholds = {name: section[name] for name in thresholds_lib.THRESHOLDS}
  problems = []
  for word in words:
    flag, _, text = word.partition('=')
    name = flag.removeprefix('--')
    if name not in thresholds or flag == name:
      hint = settings.closest(flag, [f'--{name}' for name in thresholds])
      problems.append(f'{word}: unknown flag{hint}')
      continue
    try:
      thresholds[name] = float(text)
    except ValueError:
      thresholds[name] = math.nan
    if math.isnan(thresholds[name]):
      problems.append(f'{word}: must be a number, such as --kl=2.5')
  return thresholds, problems


def _runs(folder: str) -> list[str]:
  """Returns the folders of runs in a folder of folders, or itself."""
  path = pathlib.Path(folder)
  if (path / 'metrics.jsonl').exists() or not path.is_dir():
    return [folder]
  found = sorted(str(x.parent) for x in path.glob('*/metrics.jsonl'))
  return found or [folder]


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
