"""A check that engine and trainer compute the same policy.

Ratios divide by the trainer's log-probabilities of tokens that the engine
sampled. If the two use other weights, masks or positions, training goes on and
goes wrong. On the first step of a run they must agree but for rounding; later
steps may be collected with older weights.
"""

from collections.abc import Mapping

_DIFFERENCE = 'mismatch/logprob_abs_diff'


class Disagreement(Exception):
  """The engine samples from another policy than the one that is trained."""

  exit_code = 2


def check(metrics: Mapping[str, float], *, limit: float) -> None:
  """Checks the first step of a run, before any update.

  Args:
    metrics: the metrics of the step.
    limit: the largest difference of a token's log-probabilities that counts as
      rounding, in nats; 0: no limit.

  Raises:
    Disagreement: the difference is larger, or nan.
  """
  difference = metrics[_DIFFERENCE]
  if limit > 0 and not difference <= limit:
    raise Disagreement(
      'the engine and the trainer do not compute the same policy: on the '
      f'first step, {_DIFFERENCE} is {difference:.3g}, more than '
      f'rollout.mismatch_limit={limit:g}; nothing was updated'
    )
