"""A small model learns to search a synthetic encyclopedia, on a laptop.

    make quickstart
    python -m stppo_jax train --config=configs/quickstart.py:st_ppo \
        --workdir=runs/quickstart

Hardware: two CPU cores. See the README for what to expect. Any row of
`configs/algorithms.py` can stand in the place of st_ppo.
"""

from configs import base


def get_config(row: str = 'st_ppo'):
  config = base.get_config(row)
  config.num_steps = 100
  config.algorithm.advantage.lambda_ = 0.95

  config.model.path = 'assets/quickstart'
  config.model.scan_unroll = 3

  config.env.max_turns = 3
  config.env.max_turn_tokens = 16
  config.env.max_observation_tokens = 64
  config.env.max_length = 192
  config.env.prompt_template = 'configs/prompts/quickstart.txt'
  config.retrieval.topk = 2

  config.rollout.trajectories_per_step = 128
  config.rollout.length_bucket = 32
  config.updates.minibatch_size = 64
  config.updates.num_epochs = 2
  config.policy_optimizer.update(
    learning_rate=2.5e-4, warmup_updates=20, weight_decay=0.0
  )
  config.value_optimizer.update(
    learning_rate=3e-4, warmup_updates=20, weight_decay=0.0
  )
  config.evaluate.every = 25
  config.checkpoint.every = 25
  return config
