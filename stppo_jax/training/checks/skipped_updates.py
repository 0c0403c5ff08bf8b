"""Ends a run whose updates are skipped one after the other.

An update is skipped if its gradient or its new weights are not finite. One that
is skipped now and then loses a minibatch; many in a row mean that the run
learns nothing any more, and each further step is computed in vain.
"""

from collections.abc import Mapping
from collections.abc import Sequence

import jax


class Diverged(RuntimeError):
  """Too many updates in a row were skipped."""

  exit_code = 76


class SkippedUpdates:
  """Counts the skipped updates since the last one that was done.

  Args:
    limit: the count that ends the run; 0: none does.
  """

  def __init__(self, limit: int):
    self._limit = limit
    self._count = 0

  def check(self, updates: Sequence[Mapping[str, jax.Array]]) -> None:
    """Counts updates by their metrics, the earliest first.

    Raises:
      Diverged: so many in a row were skipped; the message has the numbers of
        the last one.
    """
    for metrics in jax.device_get(updates):
      self._count = self._count + 1 if metrics['update/skipped'] else 0
      if self._limit and self._count >= self._limit:
        numbers = ', '.join(
          f'{name} {metrics[name]:g}'
          for name in ('actor/grad_norm', 'critic/grad_norm', 'actor/lr')
          if name in metrics
        )
        raise Diverged(
          f'{self._count} updates in a row were skipped, because a gradient or '
          f'a new weight was not finite (the last one: {numbers}): look for '
          'rewards that are nan or inf, or lower the learning rate; '
          f'updates.max_skipped={self._limit} is the limit, 0 is none'
        )
