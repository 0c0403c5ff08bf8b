"""Makes tests/golden/family/atpo.npz: the loss of AT2PO for the batch.

    git clone https://github.com/zzfoutofspace/ATPO
    git -C ATPO checkout 98e60f655eb2079e3f09dc9c50293f255d65fde0
    PYTHONPATH=ATPO/ATPO/verl_atpo python tests/golden/family_atpo.py

Its verl has the name of the package that make_family.py installs, so it needs
another environment, or this order of paths.
"""

import family_batch
from verl.trainer.ppo import core_algos

OPTIONS = family_batch.OPTIONS


def _loss(x):
  # The mean of a row without tokens is NaN there. A turn is a run of the mask,
  # so a hole within a turn makes two of it.
  rows = x.loss_mask_BL.any(1)
  return core_algos.compute_policy_loss_gspo_turn(
    x.old_logprobs_BL[rows],
    x.logprobs_BL[rows],
    x.advantages_BL[rows],
    x.loss_mask_BL[rows],
    cliprange_low=OPTIONS['sequence_low'],
    cliprange_high=OPTIONS['sequence_high'],
  )


def main():
  arrays = family_batch.make_arrays()
  x = family_batch.tensors(arrays)
  results = family_batch.differentiated(lambda x: _loss(x)[0], x)
  results['cut_fraction'] = _loss(x)[1]['actor/pg_clipfrac']
  family_batch.save('atpo', {'atpo': results})


if __name__ == '__main__':
  main()
