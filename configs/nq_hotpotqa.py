"""Trains on Natural Questions and HotpotQA together, as Search-R1 does.

    python -m stppo_jax data build nq --root=DATA
    python -m stppo_jax data build hotpotqa --root=DATA
    python -m stppo_jax train --config=configs/nq_hotpotqa.py:st_ppo \
        --config.data.root=DATA --config.model.path=MODEL \
        --config.retrieval.url=http://HOST:8000 --workdir=runs/nq_hotpotqa

MODEL is the Hugging Face directory of a model that follows instructions, and
the server has the passages of Wikipedia; docs/retrieval.md describes it.
Without weights, the data sets are mixed by their sizes. Set data.train to
'nq:train weight=1, hotpotqa:train weight=1' for as many questions of each.
"""

from stppo_jax.configs import base
from stppo_jax.configs import slices


def get_config(algorithm: str = 'st_ppo') -> base.Config:
  config = base.get_config(algorithm)
  config.num_steps = 500
  config.data.update(
    name='tfds',
    root='DATA',
    train='nq:train, hotpotqa:train',
    evaluation='nq:validation, hotpotqa:validation',
    corpus='',
  )
  return config


def get_sized_config(
  algorithm: str, size: str, data_set: str = ''
) -> base.Config:
  """Returns the setting of the paper for a size of Qwen2.5.

  Args:
    algorithm: an entry of the table of algorithms.
    size: a key of `slices.SLICES`.
    data_set: nq or hotpotqa; '' = both.
  """
  config = get_config(algorithm)
  if data_set:
    config.data.train = f'{data_set}:train'
    config.data.evaluation = f'{data_set}:validation'
  config.env.max_turns = 3  # searches
  slices.place(config, size)
  return config
