"""The quickstart with steps that are collected ahead of their updates.

    python -m stppo_jax ablate --config=studies/steps_ahead.py \
        --workdir=runs/steps_ahead

ST-PPO trains as in `make quickstart`, on collections of the newest policy, of
the one before it, or of the one before that (`rollout.steps_ahead`). Success at
a step is that of its dialogues, so the curves of old policies lag behind by as
many steps. The question is whether the curve is worse by more than that lag.
"""

from stppo_jax.configs import base
from stppo_jax.configs import quickstart

COMPARISONS = {
  f'{steps} ahead - 0 ahead': [f'{steps} ahead', '0 ahead'] for steps in (1, 2)
}


def get_config(algorithm: str = 'st_ppo') -> base.Config:
  return quickstart.get_config(algorithm)


def studies():
  """Returns the study; docs/your_own_study.md has its form."""
  return {
    'steps_ahead': {
      'title': 'Steps that are collected ahead, in the quickstart',
      'seeds': 8,
      'arms': {
        '': {
          f'{steps} ahead': {
            'algorithm': 'st_ppo',
            'rollout.steps_ahead': steps,
          }
          for steps in (0, 1, 2)
        },
      },
    },
  }
