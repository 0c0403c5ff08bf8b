"""Ends a run whose updates are skipped one after the other.

An update is skipped if its loss, its gradient or its new weights are not
finite, or if the norm of its gradient is above `skip_grad_norm`. One that is
skipped now and then loses a minibatch; many in a row mean that the run learns
nothing any more, and each further step is computed in vain. Skipped updates
change nothing, so the state that the run saves as it ends is sound.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import math

import jax

from stppo_jax import exits

_SHOWN = ('actor/grad_norm', 'critic/grad_norm', 'actor/lr')


class Diverged(exits.RunEnded):
  """Too many updates in a row were skipped."""

  exit_code = exits.ENDED


class SkippedUpdates:
  """Counts the skipped updates since the last one that was done.

  Args:
    limit: the count that ends the run; 0: none does.
  """

  def __init__(self, limit: int):
    self._limit = limit
    self._count = 0

  def check(
    self, step: int, updates: Sequence[Mapping[str, jax.Array]]
  ) -> None:
    """Counts the updates of a step by their metrics, the earliest first.

    Args:
      step: the number of steps that are done.
      updates: the metrics of the updates of the last one.

    Raises:
      Diverged: so many in a row were skipped; the message says in which update
        of which step, and which of its metrics are not finite.
    """
    # One transfer for all updates, once the devices are done with them.
    for number, metrics in enumerate(jax.device_get(updates), start=1):
      self._count = self._count + 1 if metrics['update/skipped'] else 0
      if self._limit and self._count >= self._limit:
        numbers = ', '.join(
          f'{name} {x:g}'
          for name, x in metrics.items()
          if name in _SHOWN or not math.isfinite(x)
        )
        raise Diverged(
          f'{self._count} updates in a row were skipped, the last is update '
          f'{number} of step {step}: its loss, a gradient or a new weight is '
          f'not finite, or the gradient is above skip_grad_norm ({numbers}); '
          f'updates.max_skipped={self._limit} is the limit (0: no limit); '
          'lower the learning rate'
        )
