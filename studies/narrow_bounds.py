"""Narrow bounds of turn ratios beside token ratios, with seeds not seen before.

    python -m stppo_jax ablate --config=studies/narrow_bounds.py \
        --workdir=runs/narrow_bounds --seeds=8,9,10,11,12,13,14,15
    python -m studies.narrow_bounds runs/narrow_bounds/narrow_bounds.csv

This study needs the run runs/critic and has the settings of studies/bounds.py.
In the study of bounds, turn ratios with bounds of .01 and 4e-3 had more success
than token ratios with any bounds, but the plan was to compare other arms. So
the arms that look best there are repeated with the seeds 8 to 15. This was
written before these runs.

Hypotheses, as differences of the area, the mean success of the 24 steps, all of
them above 0:

1. Turn ratios with bounds of .01, minus turn ratios with .2.
2. Turn ratios with .01, minus token ratios with .2, the bounds of most runs.
3. Turn ratios with 4e-3, minus token ratios with .2.
4. Turn ratios with .01, minus token ratios with the same bounds.

Stopping rule: the seeds 8 to 15 of all arms, and no more. The analysis is as in
studies/dead_critic.py, with Holm's correction for the four comparisons.
"""

import pathlib
import sys

from stppo_jax.configs import base
from stppo_jax.tools import score_report
from stppo_jax.tools.ablation import results
from studies import bounds
from studies import dead_critic

_ARMS = ('turn 0.2', 'turn 0.01', 'turn 0.004', 'token 0.2', 'token 0.01')
COMPARISONS = {
  '1 turn: .01 - .2': ['turn 0.01', 'turn 0.2'],
  '2 turn .01 - token .2': ['turn 0.01', 'token 0.2'],
  '3 turn 4e-3 - token .2': ['turn 0.004', 'token 0.2'],
  '4 .01: turn - token': ['turn 0.01', 'token 0.01'],
}


def get_config(algorithm: str = 'turn_ppo') -> base.Config:
  return bounds.get_config(algorithm)


def studies():
  """Returns the study; docs/your_own_study.md has its form."""
  arms = bounds.studies()['bounds']['arms']['']
  return {
    'narrow_bounds': {
      'title': 'Narrow bounds of turn ratios, with new seeds',
      'seeds': 8,
      'arms': {'': {name: arms[name] for name in _ARMS}},
    },
  }


if __name__ == '__main__':
  found = results.read(pathlib.Path(sys.argv[1]))
  print(score_report.as_markdown(dead_critic.analysis(found, COMPARISONS)))
