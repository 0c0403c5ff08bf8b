"""Trains as the authors of ST-PPO did, where their choices differ from ours.

    python -m stppo_jax train --config=configs/reference.py:st_ppo,7b \
        --config.data.root=DATA --config.model.path=MODEL \
        --config.retrieval.url=http://HOST:8000 --workdir=runs/reference

It is configs/nq_hotpotqa.py, whose data and sizes it takes, with the choices of
the implementation that the authors of arXiv 2511.20718 trained with.
docs/reference_run.md lists them beside ours, with what each changes on a batch,
and says which choice is not reproduced. Learning rates rise in a share of the
updates of this config: set their warm-up again if you change the number of
steps or the sizes of batches.
"""

from stppo_jax.configs import base
from stppo_jax.configs import nq_hotpotqa
from stppo_jax.configs import slices

# The choices for every algorithm; SO-GRPO has a scope of its own.
ALWAYS = {
  'updates.shuffle': False,
  'algorithm.correction.clipping_bias.scope': 'microbatch',
}
# The choices for algorithms with a value model.
WITH_VALUES = {
  'algorithm.advantage.observation_tokens': 'included',
  'algorithm.advantage.critic_tokens': 'response',
  'algorithm.advantage.whiten': 'all',
}


def get_config(argument: str = 'st_ppo') -> base.Config:
  config = nq_hotpotqa.get_config(argument)
  algorithm, _ = slices.split(argument)
  scope = config.algorithm.correction.clipping_bias.scope
  config.update_from_flattened_dict(ALWAYS)
  if config.algorithm.advantage.name == 'gae':
    config.update_from_flattened_dict(WITH_VALUES)
  if algorithm == 'so_grpo':
    # Their script for SO-GRPO has the ratio of tokens.
    config.algorithm.ratio.level = 'token'
    config.algorithm.correction.clipping_bias.scope = scope
  slices.warm_up(config)
  return config
