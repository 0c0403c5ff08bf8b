"""Makes tests/golden/family/hgpo.npz: advantages of HGPO for the batch.

    git clone https://github.com/OliverLeeXZ/SERL
    git -C SERL checkout 5a2a85b171c634bfed25687167d1347ca4474dc4
    python tests/golden/family_hgpo.py SERL/recipe/hgpo/core_hgpo.py

That is a copy of its authors' code (langfengQ/verl-agent, recipe/hgpo), of
which one file is read. The batch gets states, which recur in a question.
"""

import sys
import types
from unittest import mock

import family_batch
import numpy as np
import torch

OPTIONS = family_batch.OPTIONS


def main(path):
  core_hgpo = family_batch.module_of_verl(path, DataProto=None)
  arrays = family_batch.make_arrays()
  states_BL = np.zeros(arrays['turn_ids_BL'].shape, np.int32)
  turns = list(family_batch.turns(arrays))
  for b, turn, places, _ in turns:
    # One of three dialogues begins in another state than the others.
    states_BL[b, places] = 10 * turn + (turn == 1 and b % 3 == 2)
  rows = np.array([b for b, _, _, _ in turns])
  mask = torch.ones(len(rows), 1)
  # Both are named there, and would hide all but six digits.
  with (
    mock.patch.object(np, 'float32', np.float64),
    mock.patch.object(torch, 'float32', torch.float64),
  ):
    returns = core_hgpo.compute_step_discounted_returns(
      types.SimpleNamespace(
        non_tensor_batch={
          'rewards': np.array([reward for _, _, _, reward in turns]),
          'traj_uid': rows,
          'active_masks': np.ones(len(rows)),
        },
        batch={'input_ids': mask},
      ),
      OPTIONS['gamma'],
    )
    found, _ = core_hgpo.compute_hgpo_outcome_advantage(
      token_level_rewards=mask,
      step_rewards=returns,
      response_mask=mask.double(),
      anchor_obs=np.array(
        [states_BL[b, places[0]] for b, _, places, _ in turns]
      ),
      index=arrays['group_ids_B'][rows],
      traj_index=rows,
      history_length=OPTIONS['history'],
      epsilon=0.0,
      mode='mean_norm',
    )
  advantages_BL = np.zeros(states_BL.shape)
  for (b, _, places, _), advantage in zip(turns, found[:, 0], strict=True):
    advantages_BL[b, places] = advantage
  results = {'advantages_BL': advantages_BL, 'state_ids_BL': states_BL}
  family_batch.save('hgpo', {'centered': results})


if __name__ == '__main__':
  main(sys.argv[1])
