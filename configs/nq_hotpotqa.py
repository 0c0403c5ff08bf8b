"""Trains on Natural Questions and HotpotQA together, as Search-R1 does.

    python -m stppo_jax data build nq --root=DATA
    python -m stppo_jax data build hotpotqa --root=DATA
    python -m stppo_jax train --config=configs/nq_hotpotqa.py:st_ppo \
        --config.data.root=DATA --config.model.path=MODEL \
        --config.retrieval.url=http://HOST:8000 --workdir=runs/nq_hotpotqa

MODEL is the Hugging Face directory of a model that follows instructions, and
the server has the passages of Wikipedia; docs/retrieval.md describes it.
By default, each data set gives questions in proportion to its size. Set
data.train to 'nq:train weight=1, hotpotqa:train weight=1' to get equally many
questions of both.

The setting of the paper, which docs/algorithms.md describes, trains Qwen2.5 of
1.5B, 3B or 7B on a slice of TPU v5e. Every host of the slice runs

    python -m stppo_jax train --config=configs/nq_hotpotqa.py:st_ppo,7b \
        --config.data.root=DATA --config.model.path=MODEL \
        --config.retrieval.url=http://HOST:8000 --workdir=/shared/run

and launch/README.md has launchers that start this command. All hosts must see
/shared, DATA and MODEL. docs/recipes.md lists metrics to look at after ten
steps. With a size, `configs/nq.py` and `configs/hotpotqa.py` are the same
setting with one of the two data sets. The command

    python -m stppo_jax plan --config=configs/nq_hotpotqa.py:7b \
        --topology=v5e:8x8 --compile=False --config.model.path=MODEL

needs no data. It prints these estimates, if half of the tokens are trained on.
No run on a TPU, or on a node of eight H100, has confirmed them yet.

    size      topology   GiB of a chip seconds a step   500 steps
    1_5b      v5e:4x4    9.6 of 15.75  66, at least 28  9 hours, 146 chip-hours
    3b        v5e:8x8    6.9 of 15.75  44, at least 19  6 hours, 393 chip-hours
    7b        v5e:8x8    8.1 of 15.75  80, at least 34  11 hours, 708 chip-hours
    1_5b_node gpu:h100:8 14.6 of 79.20 28, at least 12  4 hours, 31 chip-hours
    3b_node   gpu:h100:8 24.1 of 79.20 53, at least 23  7 hours, 59 chip-hours
    7b_node   gpu:h100:8 50.5 of 79.20 116, at least 50 16 hours, 129 chip-hours
"""

from stppo_jax.configs import base
from stppo_jax.configs import slices


def get_config(argument: str = 'st_ppo') -> base.Config:
  algorithm, size = slices.split(argument)
  config = base.get_config(algorithm)
  config.num_steps = 500
  config.data.update(
    name='tfds',
    root='DATA',
    train='nq:train, hotpotqa:train',
    evaluation='nq:validation, hotpotqa:validation',
    corpus='',
  )
  if size:
    config.env.max_turns = 3  # searches
    slices.place(config, size)
  return config


def of_one(data_set: str, argument: str) -> base.Config:
  """Returns the config for one of the two data sets, nq or hotpotqa.

  Args:
    data_set: nq or hotpotqa.
    argument: the argument of `get_config`.
  """
  config = get_config(argument)
  config.data.train = f'{data_set}:train'
  config.data.evaluation = f'{data_set}:validation'
  return config
