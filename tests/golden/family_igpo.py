"""Makes tests/golden/family/igpo.npz: advantages of IGPO for the batch.

    git clone https://github.com/debajoycs98/IGPO
    git -C IGPO checkout 866019637ff3cc61fd093b0e7acbdd2442af0733
    PYTHONPATH=IGPO python tests/golden/family_igpo.py

That is a copy of its authors' code (GuoqingWang1/IGPO), whose first commit has
another estimator. Only one file of its verl is read, without the packages that
the others need.
"""

import pathlib
import sys

import family_batch
import numpy as np
import torch


def main():
  torch.set_default_dtype(torch.float64)  # that of the sums over a group
  folder = next(p for p in sys.path if (pathlib.Path(p) / 'verl').is_dir())
  path = pathlib.Path(folder) / 'verl' / 'trainer' / 'ppo' / 'core_algos.py'
  core_algos = family_batch.module_of_verl(path)
  x = family_batch.make_arrays()
  mask_BL = x['loss_mask_BL']
  # There, a row has its policy tokens only, and rewards on the last of a turn.
  rewards_BL, packed_BL = np.zeros((2, *mask_BL.shape))
  for b in range(family_batch.B):
    places = np.flatnonzero(mask_BL[b])
    packed_BL[b, : len(places)] = 1
  for b, _, places, reward in family_batch.turns(x):
    rewards_BL[b, mask_BL[b, : places[-1]].sum()] = reward
  results = {}
  for mode in ('joint', 'separate'):
    found_BL, _ = core_algos.compute_grpo_outcome_advantage(
      torch.from_numpy(rewards_BL),
      torch.from_numpy(packed_BL),
      x['group_ids_B'],
      gamma=family_batch.OPTIONS['gamma'],
      info_gain_norm_mode=mode,
    )
    advantages_BL = np.zeros(mask_BL.shape)
    for b in range(family_batch.B):
      places = np.flatnonzero(mask_BL[b])
      advantages_BL[b, places] = found_BL[b, : len(places)].numpy()
    results[mode] = {'advantages_BL': advantages_BL}
  family_batch.save('igpo', results)


if __name__ == '__main__':
  main()
