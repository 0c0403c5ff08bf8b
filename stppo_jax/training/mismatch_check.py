"""Whether engine and trainer compute the same policy.

Ratios divide by what the trainer says of tokens that the engine drew. Where
the two are of different weights, masks or positions, training goes on and goes
wrong; on the first step of a run nothing else can set them apart.
"""

from collections.abc import Mapping

_DIFFERENCE = 'mismatch/logprob_abs_diff'


class Disagreement(Exception):
  """The engine plays another policy than the one that is trained."""

  exit_code = 2


def check(metrics: Mapping[str, float], *, limit: float) -> None:
  """Checks the first step of a run, before any update.

  Args:
    metrics: of the step.
    limit: the largest difference of the log-probabilities of a token that
      is rounding, nats; 0 = any.

  Raises:
    Disagreement: it is larger, or no number.
  """
  difference = metrics[_DIFFERENCE]
  if limit > 0 and not difference <= limit:
    raise Disagreement(
      'the engine and the trainer do not compute the same policy: on the '
      f'first step, {_DIFFERENCE} is {difference:.3g}, more than '
      f'rollout.mismatch_limit={limit:g}; nothing was updated'
    )
