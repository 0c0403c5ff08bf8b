"""The random batches of tests/rl with the names of a saved batch."""

import numpy as np

from stppo_jax.tools.lab import saved_batch
from tests.rl import batches


def arrays(seed=0, spread=0.4, poison=np.nan):
  """Returns (arrays by the names of a file, batch, logprobs, entropy).

  The arrays have masks of integers, sparse ids, and poison wherever the loss
  mask is false; the others do not.
  """
  batch, logprobs, entropy = batches.make(seed, spread)
  # The noise of a batch exceeds 0, which a file's log-probabilities may not.
  below_0 = lambda x: x - 4.0
  batch = batch.replace(
    **{
      name: below_0(x)
      for name, x in batches.fields(batch).items()
      if name.endswith('logprobs_BL')
    }
  )
  logprobs = below_0(logprobs)
  mask = batch.loss_mask_BL
  found = batches.fields(batch)
  found['old_values_BL'] = found.pop('values_BL')
  found |= {'logprobs_BL': logprobs, 'entropy_BL': entropy}
  for name, x in found.items():
    if name.endswith('_BL') and x.dtype.kind == 'f':
      found[name] = batches.poison_array(x, mask, poison)
  for name in ('turn_ids_BL', 'sentence_ids_BL'):
    found[name] = np.where(mask, found[name], -7).astype(np.int64)
  found['loss_mask_BL'] = mask.astype(np.uint8)
  found['group_ids_B'] = found['group_ids_B'].astype(np.int64) * 2**40
  return found, batch, logprobs, entropy


def selected(arrays, needs):
  """Returns the arrays that are needed, in float64."""
  needs = dict.fromkeys(needs, 'it')
  return saved_batch.select(arrays, needs, dtype=np.float64)
