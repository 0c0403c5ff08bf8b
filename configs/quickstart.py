"""Trains a small model to search a synthetic encyclopedia, on a laptop.

    make quickstart
    python -m stppo_jax train --config=configs/quickstart.py:st_ppo \
        --workdir=runs/quickstart

The run takes some four minutes on two CPU cores. Expect val/em/one_hop and
val/em/two_hop of at least 0.99 at the end. Any algorithm of
`configs/algorithms.py` can take the place of st_ppo. The weights in
assets/quickstart, from which the run starts, were made by

    python -m stppo_jax sft --config=configs/quickstart.py \
        --config.model.path= --workdir=runs/start
"""

import pathlib

from stppo_jax.configs import base

_FOLDER = pathlib.Path(__file__).resolve().parent


def get_config(algorithm: str = 'st_ppo') -> base.Config:
  config = base.get_config(algorithm)
  config.num_steps = 60
  if config.algorithm.advantage.name == 'gae':
    config.algorithm.advantage.lambda_ = 0.95
  if config.algorithm.aggregate.name == 'constant_length':
    # four turns of 16 tokens
    config.algorithm.aggregate.max_response_tokens = 64.0

  config.model.path = str(_FOLDER.parent / 'assets' / 'quickstart')
  config.model.scan_unroll = 3

  config.env.max_turns = 3
  config.env.max_turn_tokens = 16
  config.env.max_observation_tokens = 64
  config.env.max_length = 192
  config.env.prompt_template = str(_FOLDER / 'prompts' / 'quickstart.txt')
  config.retrieval.topk = 2

  config.rollout.trajectories_per_step = 128
  if config.rollout.group_size > 1:
    config.rollout.group_size = 8  # divides trajectories_per_step
  # One length for all batches. Shorter batches would save no padding, because
  # several trajectories share a row of the forward pass.
  config.rollout.length_bucket = config.env.max_length
  config.updates.minibatch_size = 64
  config.updates.core_rows = 2  # few enough rows to fit the cache of a core
  config.updates.num_epochs = 2
  # This exceeds the tokens of a minibatch, so there is one chunk. With a small
  # vocabulary all logits fit in memory, and a loop over chunks would only take
  # time.
  config.updates.head_chunk = 8192
  config.policy_optimizer.update(
    learning_rate=2.5e-4, warmup_updates=20, weight_decay=0.0
  )
  config.value_optimizer.update(
    learning_rate=3e-4, warmup_updates=20, weight_decay=0.0
  )
  config.sft.num_steps = 1600
  config.sft.clean_one_hop_steps = 600
  config.sft.clean_steps = 200
  config.evaluate.every = 10
  config.checkpoint.every = 20
  return config
