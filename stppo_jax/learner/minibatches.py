"""The rows of every minibatch: a function of (seed, step, epoch)."""

import numpy as np


def minibatch_rows(
  num_rows: int, *, size: int, count: int, seed: int, step: int
) -> list[np.ndarray]:
  """Returns the row numbers of each minibatch of a step, epoch by epoch.

  Every epoch of every step has its own permutation. It is derived from the
  arguments and not stored, so a resumed run uses the same minibatches.

  Args:
    num_rows: rows of the collected batch.
    size: rows of a minibatch; divides `num_rows`.
    count: the number of minibatches, from as many epochs as necessary.
    seed: the run's seed.
    step: the training step.

  Returns:
    int32 arrays of `size` row numbers.
  """
  num_epochs = -(-count * size // num_rows)
  order = np.concatenate(
    [
      np.random.default_rng((seed, step, epoch)).permutation(num_rows)
      for epoch in range(max(1, num_epochs))
    ]
  )
  return np.split(order.astype(np.int32), len(order) // size)[:count]
