"""Trains Qwen2.5-3B on Natural Questions and HotpotQA, on a slice v5e:8x8.

    python -m stppo_jax train --config=configs/nq_hotpotqa_3b.py:st_ppo \
        --config.data.root=DATA --config.model.path=MODEL \
        --config.retrieval.url=http://HOST:8000 --workdir=/shared/run

Every host of the slice runs this command; launch/README.md has launchers that
start it. All hosts must see /shared, DATA and MODEL, which are those of
`configs/nq_hotpotqa.py`, and so is HOST. The setting is that of the paper, see
docs/algorithms.md. For one data set, set data.train to
nq:train or hotpotqa:train, and data.evaluation likewise.

    python -m stppo_jax plan --config=FILE --topology=v5e:8x8 --compile=False \
        --config.model.path=MODEL --config.data.name=synthetic_wiki

needs no data, and with FILE for this file it estimates, if half of the tokens
are trained on (no run on a TPU has confirmed it yet):

    11.2 of 15.75 GiB of a chip
    75 seconds a step, at least 27
    10 hours and 670 chip-hours for 500 steps
"""

from stppo_jax.configs import base
from stppo_jax.configs import nq_hotpotqa
from stppo_jax.configs import slices


def get_config(algorithm: str = 'st_ppo') -> base.Config:
  config = nq_hotpotqa.get_config(algorithm)
  config.env.max_turns = 3  # searches
  slices.place(config, '3b')
  slices.warm_up(config)
  return config
