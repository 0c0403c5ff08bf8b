"""Trains Qwen2.5-1.5B on HotpotQA, on a slice v5e:4x4.

    python -m stppo_jax train --config=configs/hotpotqa_1_5b.py:st_ppo \
        --config.data.root=DATA --config.model.path=MODEL \
        --config.retrieval.url=http://HOST:8000 --workdir=/shared/run

Every host of the slice runs this command; launch/README.md has launchers that
start it. `configs/nq_hotpotqa.py` explains DATA, MODEL and HOST; all hosts must
see /shared, DATA and MODEL. The setting is that of the paper, which
docs/algorithms.md describes.

    python -m stppo_jax plan --config=configs/hotpotqa_1_5b.py \
        --topology=v5e:4x4 --compile=False --config.model.path=MODEL \
        --config.data.name=synthetic_wiki

needs no data. If half of the tokens are trained on, it estimates (no run on a
TPU has confirmed it yet):

    13.0 of 15.75 GiB of a chip
    108 seconds a step, at least 40
    15 hours and 241 chip-hours for 500 steps
"""

from stppo_jax.configs import base
from stppo_jax.configs import nq_hotpotqa


def get_config(algorithm: str = 'st_ppo') -> base.Config:
  return nq_hotpotqa.get_sized_config(algorithm, '1_5b', 'hotpotqa')
