"""Compares the level of the ratio and the correction, on Natural Questions.

    python -m launch.sweep --config=configs/sweeps/nq_2x2.py \
        --out=/shared/runs/nq-2x2 --on=slurm --partition=gpu --jobs=4 \
        --config.data.root=DATA --config.model.path=MODEL

The four algorithms and the pairing of seeds are as in quickstart_2x2.py.
`python -m stppo_jax data build qed --root=DATA` makes DATA, as for
configs/nq.py. MODEL is a Hugging Face directory. Without model.path, small
random models are trained. Every node must see DATA and MODEL. The sizes are as
in configs/nq.py, whose runs have only 20 steps. So this file shows how a sweep
works, and does not repeat the comparison of the paper.
"""

from stppo_jax.configs import nq

get_config = nq.get_config


def sweep():
  return {
    'algorithm': ['token_ppo', 's_ppo', 'turn_ppo', 'st_ppo'],
    'seed': [0, 1, 2],
  }
