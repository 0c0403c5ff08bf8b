"""Token ratios beside turn ratios: a first comparison on two cores.

    python -m stppo_jax ablate --config=studies/token_or_turn.py \
        --workdir=runs/token_or_turn

Both algorithms train from the same weights and, with each seed, on the same
questions, under the stress of studies/collapse.py, where the policy moves far
from the policy that collected. runs/token_or_turn/report.html shows the runs
side by side and their paired differences. A few seeds prove nothing: the study
`levels` of studies/collapse.py has eight seeds, and docs/collapse.md has its
results.
"""

from stppo_jax.configs import base
from studies import collapse


def get_config(algorithm: str = 'turn_ppo') -> base.Config:
  config = collapse.get_config(algorithm)
  config.num_steps = 20
  # All batches have one length, and so one set of compiled programs. Programs
  # for shorter batches would take longer to compile than they would save in so
  # few steps.
  config.rollout.length_bucket = config.env.max_length
  # The policy is evaluated greedily, only at the start and at the end.
  config.evaluate.every = config.num_steps
  return config


def studies():
  """Returns the study; docs/your_own_study.md has its form."""
  return {
    'token_or_turn': {
      'title': 'Token ratios beside turn ratios',
      'seeds': 3,
      'arms': {'': {'token_ppo': {}, 'turn_ppo': {}}},
    },
  }
