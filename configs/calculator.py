"""Trains a small model to use a calculator, on a laptop.

    python -m stppo_jax train --config=configs/calculator.py:st_ppo \
        --workdir=runs/calculator

The run first imitates demonstrations with errors. Reinforcement learning then
selects what earns rewards: to call the calculator with the numbers of the
question, and to answer with its result. How well it learns has not been
measured. Any algorithm of `configs/algorithms.py` can take the place of st_ppo.
"""

import pathlib

from stppo_jax.configs import base
from stppo_jax.configs import quickstart

_FOLDER = pathlib.Path(__file__).resolve().parent


def get_config(algorithm: str = 'st_ppo') -> base.Config:
  config = quickstart.get_config(algorithm)
  config.num_steps = 40
  config.model.path = ''
  config.data.name = 'arithmetic'
  config.env.name = 'tools'
  config.env.max_turns = 1
  config.env.max_length = 96
  config.env.max_observation_tokens = 32

  config.sft.before_training = True
  config.sft.num_steps = 500
  config.sft.clean_one_hop_steps = 0
  config.sft.clean_steps = 300
  return config
