"""Makes tests/golden/family/a2tgpo.npz: advantages and loss of A2TGPO.

    git clone https://github.com/manavsehgal/ai-field-notes
    git -C ai-field-notes checkout f68990d499b3c811f42a34c677d4e2e8b835cdf9
    cd ai-field-notes/articles/a2tgpo-turn-clipping-on-spark/evidence
    python tests/golden/family_a2tgpo.py \
        repo-snapshot/ATGPO/verl_atgpo/verl/trainer/ppo/core_algos.py

with the path of this script. That is a copy of its authors' code
(CuSO4-Chen/A-TGPO). Only one file of its verl is read, without the packages
that the others need.
"""

import sys

import family_batch
import numpy as np
import torch

OPTIONS = family_batch.OPTIONS


def _estimated(core_algos, arrays):
  """Returns advantages and scales of bounds, both [B, L]."""
  mask_BL = arrays['loss_mask_BL']
  rewards_BL, last_B = np.zeros(mask_BL.shape), {}
  for b, _, places, reward in family_batch.turns(arrays):
    rewards_BL[b, places[-1]] = reward
    last_B[b] = places[-1]
  # Our outcome is the reward of the last token alone.
  for b, last in last_B.items():
    rewards_BL[b, last] = arrays['rewards_BL'][b, last]
  advantages_BL, _, scales_BL = core_algos.compute_igpo_step_advantage(
    torch.from_numpy(rewards_BL),
    torch.from_numpy(mask_BL.astype(float)),
    arrays['group_ids_B'],
    gamma=OPTIONS['gamma'],
    info_gain_norm_mode='turn-group-v1d',
    adv_rescale_alpha=OPTIONS['turn_weight'],
  )
  return advantages_BL, scales_BL


def main(path):
  torch.set_default_dtype(torch.float64)  # that of the sums over a group
  core_algos = family_batch.module_of_verl(path)
  arrays = family_batch.make_arrays()
  x = family_batch.tensors(arrays)
  x.advantages_BL, x.scales_BL = _estimated(core_algos, arrays)
  # The mean of a row without tokens is NaN there.
  rows = x.loss_mask_BL.any(1)

  def loss(x):
    return core_algos.compute_policy_loss_gspo_turn(
      x.old_logprobs_BL[rows],
      x.logprobs_BL[rows],
      x.advantages_BL[rows],
      x.loss_mask_BL[rows],
      cliprange_low=OPTIONS['sequence_low'],
      cliprange_high=OPTIONS['sequence_high'],
      dynamic_clip=True,
      ig_clip_scale=x.scales_BL[rows],
    )

  results = family_batch.differentiated(lambda x: loss(x)[0], x)
  results['cut_fraction'] = loss(x)[1].numpy()
  results['advantages_BL'] = x.advantages_BL.numpy()
  results['scales_BL'] = x.scales_BL.numpy()
  family_batch.save('a2tgpo', {'a2tgpo': results})


if __name__ == '__main__':
  main(sys.argv[1])
