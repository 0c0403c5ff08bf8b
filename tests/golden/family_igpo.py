"""Makes tests/golden/family/igpo.npz: advantages of IGPO for the batch.

    git clone https://github.com/debajoycs98/IGPO
    git -C IGPO checkout 866019637ff3cc61fd093b0e7acbdd2442af0733
    PYTHONPATH=IGPO python tests/golden/family_igpo.py

That is a copy of its authors' code (GuoqingWang1/IGPO), whose first commit has
another estimator. Only one file of its verl is read, without the packages that
the others need.
"""

import importlib.util
import pathlib
import sys
import types

import family_batch
import numpy as np
import torch


def _core_algos():
  """Returns the module, whose import of torch helpers is not needed here."""
  for name in ('verl', 'verl.utils', 'verl.utils.torch_functional'):
    sys.modules[name] = types.ModuleType(name)
  folder = next(p for p in sys.path if (pathlib.Path(p) / 'verl').is_dir())
  path = pathlib.Path(folder) / 'verl' / 'trainer' / 'ppo' / 'core_algos.py'
  spec = importlib.util.spec_from_file_location('core_algos', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def main():
  torch.set_default_dtype(torch.float64)  # that of the sums over a group
  x = family_batch.make_arrays()
  mask_BL, ids_BL = x['loss_mask_BL'], x['turn_ids_BL']
  # There, a row has its policy tokens only, and rewards on the last of a turn.
  rewards_BL, packed_BL = np.zeros((2, *mask_BL.shape))
  for b in range(family_batch.B):
    places = np.flatnonzero(mask_BL[b])
    packed_BL[b, : len(places)] = 1
    for turn in set(ids_BL[b, places]):
      own = ids_BL[b, places] == turn
      rewards_BL[b, np.flatnonzero(own)[-1]] = x['rewards_BL'][
        b, places[own]
      ].sum()
  results = {}
  for mode in ('joint', 'separate'):
    found_BL, _ = _core_algos().compute_grpo_outcome_advantage(
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
    results[f'{mode}.advantages_BL'] = advantages_BL
  path = pathlib.Path(__file__).parent / 'family' / 'igpo.npz'
  np.savez(path, **results)


if __name__ == '__main__':
  main()
