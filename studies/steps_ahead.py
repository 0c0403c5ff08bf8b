"""The quickstart with steps that are collected ahead of their updates.

    python -m stppo_jax ablate --config=studies/steps_ahead.py \
        --workdir=runs/steps_ahead

ST-PPO trains as in `make quickstart`, on collections of the newest policy, or
of the policy that is one or two steps older (`rollout.steps_ahead`). The
success at a step is the success of the step's dialogues, so the curve of an
older policy lags behind by as many steps. The question is whether the curve is
worse by more than this lag.

It is. Two more arms were planned, in which the denominator of the ratio is the
policy before the step's updates (`updates.old_policy=current`) and the
correction `tis` weighs each token. After 24 steps of the first seed they were
no better than the arms with the old denominator, so they were given up.

Two further arms were planned when those runs were known, in which each turn
takes the newest weights (`rollout.turn_swaps=keep`). The hypothesis was that,
without the lag, they are as good as runs with no steps ahead. It was not
tested: to collect a step takes less time than to train on the step before, so
newer weights hardly ever come in the middle of a dialogue. In eight runs with a
core each, four of either arm, there was no such turn, and in three on a busy
machine there were some in 1 to 16 of 60 steps. So these arms were given up, and
their runs are not in the table.

    python -m studies.steps_ahead docs/collapse/steps_ahead.csv.gz

compares the curves without the lag. For a run with k steps ahead, it takes the
mean success of all steps except the first k; for a run with no steps ahead, of
all steps except the last k. It also says how many more steps a run with steps
ahead takes until the mean of five steps is .9, with the lag and without it.
This was written after the first 24 runs.
"""

import pathlib
import sys

import numpy as np

from stppo_jax.configs import base
from stppo_jax.configs import quickstart
from stppo_jax.tools import score_report
from stppo_jax.tools.ablation import results
from stppo_jax.tools.ablation import statistics

_STEPS = (1, 2)
COMPARISONS = {
  f'{steps} ahead - 0 ahead': [f'{steps} ahead', '0 ahead'] for steps in _STEPS
}


def get_config(algorithm: str = 'st_ppo') -> base.Config:
  return quickstart.get_config(algorithm)


def studies():
  """Returns the study; docs/your_own_study.md has its form."""
  arms = {
    f'{steps} ahead': {
      'algorithm': 'st_ppo',
      'rollout.steps_ahead': steps,
    }
    for steps in (0, *_STEPS)
  }
  return {
    'steps_ahead': {
      'title': 'Steps that are collected ahead, in the quickstart',
      'seeds': 8,
      'arms': {'': arms},
    },
  }


def beyond_the_lag(runs: list[results.Run]) -> list[list[str]]:
  """Returns a table that compares each arm with the arm '0 ahead'.

  The module's docstring says how the lag is left out.
  """
  curves = {(run.arm, run.seed): run.per_step('success') for run in runs}
  head = ['arm', 'seeds', 'beyond the lag', '95 %', 'larger', 'p']
  table = [[*head, 'steps to .9', '95 %', 'without the lag', '95 %']]
  for arm in dict.fromkeys(run.arm for run in runs):
    steps = int(arm.split()[0])
    seeds = [run.seed for run in runs if steps and run.arm == arm]
    if not seeds:
      continue
    found = statistics.difference(
      [float(curves[arm, seed][steps:].mean()) for seed in seeds],
      [float(curves['0 ahead', seed][:-steps].mean()) for seed in seeds],
    )
    estimate = found.estimate
    more = []
    for lag in (0, steps):
      shares = [
        (steps_to(curves[arm, n]) - lag) / steps_to(curves['0 ahead', n]) - 1
        for n in seeds
      ]
      mean = statistics.mean(shares)
      more += [f'{mean.mean:+.0%}', f'{mean.low:+.0%}..{mean.high:+.0%}']
    table.append(
      [
        arm,
        str(found.seeds),
        f'{estimate.mean:+.3f}',
        f'{estimate.low:+.3f}..{estimate.high:+.3f}',
        f'{found.larger}/{found.seeds}',
        f'{found.p:.3f}',
        *more,
      ]
    )
  return table


def steps_to(success: np.ndarray, level: float = 0.9) -> int:
  """Returns the first step at which success has reached `level`.

  Success has reached `level` if its mean over the last five steps is at least
  `level`.

  Raises:
    ValueError: if there is no such step.
  """
  means = np.convolve(success, np.ones(5) / 5, mode='valid')
  reached = np.flatnonzero(means >= level)
  if not len(reached):
    raise ValueError(f'no five steps in a row have a mean of {level:g}')
  return int(reached[0]) + 5


if __name__ == '__main__':
  shown = beyond_the_lag(results.read(pathlib.Path(sys.argv[1])))
  print(score_report.as_markdown(shown))
