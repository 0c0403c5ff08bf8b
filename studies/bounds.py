"""Varies the bounds of the ratios of turns and of tokens.

    python -m stppo_jax ablate --config=studies/bounds.py --workdir=runs/bounds
    python -m studies.bounds runs/bounds/bounds.csv

This study needs the run runs/critic and has the stress of
studies/dead_critic.py, with the trained critic: 88 runs of about two
core-minutes each. All that follows was written before the runs.

The bounds .8 and 1.2 were made for the ratio of one token. The ratio of a turn
of n tokens is a mean, and its spread is n^-1/2 times the spread of one token's
ratio if the tokens are independent (docs/turn_bounds.md: measured exponents of
.44 to .54). A turn has 7 tokens here, so bounds of .075 should do for turns
what .2 does for tokens.

Hypotheses, as differences of the area, the mean success of the 24 steps:

1. Turn ratios are better with bounds of .1 than with .2.
2. Turn ratios are better with bounds that follow the length, `by_length`, than
   with .2.
3. Turn ratios are worse with 4e-3, which would suit 2,500 independent tokens,
   than with .1.
4. Turn ratios with `by_length` are better than token ratios with .2: at bounds
   that cut as often, the level matters and not only the width.

Token ratios with narrower bounds are the control: if they are as stable as turn
ratios that cut as many tokens, the width of the bounds is what helps. This is
read off the tables (area beside cut) and not tested.

Stopping rule and analysis are as in studies/dead_critic.py: the seeds 0 to 7 of
all arms, and Holm's correction for the four comparisons.
"""

import pathlib
import sys

from stppo_jax.configs import base
from stppo_jax.tools import score_report
from stppo_jax.tools.ablation import results
from studies import dead_critic

_BOUNDS = 'algorithm.bounds'
_WIDTHS = (0.2, 0.1, 0.03, 0.01, 4e-3)
COMPARISONS = {
  '1 turn: .1 - .2': ['turn 0.1', 'turn 0.2'],
  '2 turn: by_length - .2': ['turn by_length', 'turn 0.2'],
  '3 turn: 4e-3 - .1': ['turn 0.004', 'turn 0.1'],
  '4 by_length - token .2': ['turn by_length', 'token 0.2'],
}


def get_config(algorithm: str = 'turn_ppo') -> base.Config:
  config = dead_critic.get_config(algorithm)
  config.init_from = dead_critic.WARM
  config.policy_optimizer.learning_rate = dead_critic.MATCHED['trained']
  return config


def studies():
  """Returns the study; docs/your_own_study.md has its form."""
  arms = {
    f'{level} {width:g}': {
      'algorithm': f'{level}_ppo',
      f'{_BOUNDS}.clip_low': width,
      f'{_BOUNDS}.clip_high': width,
    }
    for level in ('turn', 'token')
    for width in _WIDTHS
  }
  arms['turn by_length'] = {
    'algorithm': 'turn_ppo',
    f'{_BOUNDS}.name': 'by_length',
  }
  return {
    'bounds': {
      'title': 'Bounds of the ratios of turns and of tokens',
      'seeds': 8,
      'arms': {'': arms},
    },
  }


if __name__ == '__main__':
  found = results.read(pathlib.Path(sys.argv[1]))
  print(score_report.as_markdown(dead_critic.analysis(found, COMPARISONS)))
