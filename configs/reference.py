"""Trains with the choices of the authors of ST-PPO that differ from ours.

    python -m stppo_jax train --config=configs/reference.py:st_ppo,7b \
        --config.data.root=DATA --config.model.path=MODEL \
        --config.retrieval.url=http://HOST:8000 --workdir=runs/reference

This config has the data and the sizes of configs/nq_hotpotqa.py, and the
choices of the implementation that the authors of arXiv 2511.20718 trained with.
docs/reference_run.md lists these choices beside ours, with the effect of each
choice on a batch, and names the choice that is not reproduced. The warm-up of
the learning rates is computed from the number of updates of this config. If you
change the number of steps or the sizes of batches, set the warm-up again.
"""

from stppo_jax.configs import base
from stppo_jax.configs import nq_hotpotqa
from stppo_jax.configs import slices

# The authors' choices for every algorithm. Only SO-GRPO keeps the scope that
# the correction has in the table of algorithms.
ALWAYS = {
  'updates.shuffle': False,
  'algorithm.correction.clipping_bias.scope': 'microbatch',
}
# The authors' choices for algorithms whose advantages come from `gae`.
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
    # The authors' script for SO-GRPO uses the ratio of tokens.
    config.algorithm.ratio.level = 'token'
    config.algorithm.correction.clipping_bias.scope = scope
  slices.warm_up(config)
  return config
