"""Compares the level of the ratio and the correction, on the quickstart.

    python -m launch.sweep --config=configs/sweeps/quickstart_2x2.py \
        --out=runs/2x2 --jobs=2

|                    | no correction | clipping-bias correction |
| ratio of the token | token_ppo     | s_ppo                    |
| ratio of the turn  | turn_ppo      | st_ppo                   |

The runs of one seed are paired: they ask the same questions, start from the
same weights and sample with the same keys. On two CPU cores, the 20 runs take
some 80 minutes. The quickstart is easy, so expect no difference. The setting of
the paper is `configs/nq_hotpotqa.py` with a size, such as `:st_ppo,7b`.
"""

from stppo_jax.configs import quickstart

get_config = quickstart.get_config


def sweep():
  return {
    'algorithm': ['token_ppo', 's_ppo', 'turn_ppo', 'st_ppo'],
    'seed': [0, 1, 2, 3, 4],
  }
