"""Ends a run whose updates are skipped one after the other.

An update is skipped if its loss, its gradient or its new weights are not
finite, or if the norm of its gradient is above `skip_grad_norm`. One that is
skipped now and then loses a minibatch; many in a row mean that the run learns
nothing any more, and each further step is computed in vain.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import pathlib

import jax

from stppo_jax import exits

Dump = Callable[[int, Mapping[str, float]], pathlib.Path | None]


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
    self,
    updates: Sequence[Mapping[str, jax.Array]],
    dump: Dump = lambda update, metrics: None,
  ) -> None:
    """Counts updates by their metrics, the earliest first.

    Args:
      updates: the metrics of the updates of a step.
      dump: called before the run ends, with the number in the step and the
        metrics of the last update, if that one was skipped; writes them down
        and returns the folder.

    Raises:
      Diverged: so many in a row were skipped; the message has the numbers of
        the last one.
    """
    fetched = jax.device_get(updates)
    for metrics in fetched:
      self._count = self._count + 1 if metrics['update/skipped'] else 0
      if self._limit and self._count >= self._limit:
        last = max(n for n, m in enumerate(fetched) if m['update/skipped'])
        metrics, folder = fetched[last], None
        # If others were made after it, the state before it is lost: repeated
        # with the state after the step, it could be sound.
        if last == len(fetched) - 1:
          folder = dump(last, metrics)
        numbers = ', '.join(
          f'{name} {metrics[name]:g}'
          for name in ('actor/grad_norm', 'critic/grad_norm', 'actor/lr')
          if name in metrics
        )
        advice = ''
        if folder is not None:
          advice = f'; python -m stppo_jax replay {folder} repeats the last one'
        raise Diverged(
          f'{self._count} updates in a row were skipped, because the loss, a '
          'gradient or a new weight was not finite or the gradient was above '
          f'skip_grad_norm (the last one: {numbers}): lower the learning rate; '
          f'updates.max_skipped={self._limit} is the limit; 0: no limit{advice}'
        )
