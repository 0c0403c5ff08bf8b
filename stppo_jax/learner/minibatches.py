"""The rows of every minibatch: a function of (seed, step, epoch)."""

import numpy as np


def minibatch_rows(
  num_rows: int, *, size: int, seed: int, step: int, epoch: int
) -> list[np.ndarray]:
  """Returns the row numbers of each minibatch of an epoch.

  Every epoch of every step has its own permutation. It is derived from the
  arguments and not stored, so a resumed run uses the same minibatches.

  Args:
    num_rows: rows of the collected batch.
    size: rows of a minibatch; divides `num_rows`.
    seed: the run's seed.
    step: the training step.
    epoch: the pass over the batch, from 0.

  Returns:
    int32 arrays of `size` row numbers.
  """
  generator = np.random.default_rng((seed, step, epoch))
  order = generator.permutation(num_rows).astype(np.int32)
  return np.split(order, num_rows // size)
