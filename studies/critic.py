"""A task on which a critic has something to know, for studies of critics.

    python -m stppo_jax sft --config=studies/critic.py --workdir=runs/start
    python -m stppo_jax train --config=studies/critic.py:st_ppo \
        --config.model.path=runs/start/policy --workdir=runs/critic

Questions of up to three hops are asked, among passages that no fact points to.
The demonstrations, from which the policy starts, err in their first turn only,
and repair half of the queries that found nothing. So most of what a dialogue
will earn is decided early.
"""

from stppo_jax.configs import base
from stppo_jax.configs import quickstart


def get_config(algorithm: str = 'st_ppo') -> base.Config:
  config = quickstart.get_config(algorithm)
  config.model.path = ''
  config.data.synthetic_wiki.hops = (1, 2, 3)
  config.data.synthetic_wiki.distractors = 40
  config.data.synthetic_wiki.error_turns = 1
  config.data.synthetic_wiki.repair_rate = 0.5
  config.env.max_turns = 4
  config.env.max_length = 320
  config.rollout.length_bucket = 64
  config.sft.error_rate = 0.6
  if config.algorithm.advantage.name == 'gae':
    config.algorithm.advantage.lambda_ = 1.0
  return config
