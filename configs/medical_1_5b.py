"""Trains Qwen2.5-1.5B-Instruct on medical questions, on a slice v5e:4x4.

    python -m stppo_jax train --config=configs/medical_1_5b.py:st_ppo \
        --config.data.root=DATA --config.model.path=MODEL \
        --config.retrieval.url=http://HOST:8000 --workdir=/shared/run

Every host of the slice runs this command; launch/README.md has launchers that
start it. `configs/medical.py` explains DATA, MODEL and HOST; all hosts must see
/shared, DATA and MODEL. As in the paper (arXiv:2511.20718), a step has 256
questions, a minibatch 128 trajectories, and a dialogue at most 6 searches.

    python -m stppo_jax plan --config=configs/medical_1_5b.py \
        --topology=v5e:4x4 --compile=False --config.model.path=MODEL \
        --config.data.name=synthetic_wiki

needs no data. If half of the tokens are trained on, it estimates (no run on a
TPU has confirmed it yet):

    13.0 of 15.75 GiB of a chip
    54 seconds a step, at least 20
    3 hours and 48 chip-hours for 200 steps
"""

from stppo_jax.configs import base
from stppo_jax.configs import medical


def get_config(algorithm: str = 'st_ppo') -> base.Config:
  return medical.get_sized_config(algorithm, '1_5b')
