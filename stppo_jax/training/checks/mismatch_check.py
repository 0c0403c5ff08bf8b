"""A check that engine and trainer compute the same policy.

Ratios divide by the trainer's log-probabilities of tokens that the engine
sampled. If the two use other weights, masks or positions, training goes on and
goes wrong. On the first step of a run they must agree but for rounding; later
steps may be collected with older weights.

A mean and a percentile are compared, because neither grows with the number of
tokens as the largest difference does.
"""

from collections.abc import Mapping

from stppo_jax import exits

_MEAN = 'mismatch/logprob_abs_diff_mean'
_TAIL = 'mismatch/logprob_abs_diff_p99'
# The largest mean difference, nats, that is rounding, by the type of the
# computations: for float32 ten times the rounding that was measured, or more;
# for bfloat16 twice that of a model of 28 layers. See docs/models.md.
_LIMITS = {'float32': 2e-5, 'bfloat16': 0.05}
_TAIL_PER_MEAN = 10  # the limit of the percentile, in limits of the mean


class Disagreement(Exception):
  """The engine samples from another policy than the one that is trained."""

  exit_code = exits.USAGE


def check(config, metrics: Mapping[str, float]) -> None:
  """Checks the first step of a run, before any update.

  `rollout.mismatch_limit` is the largest difference of log-probabilities, mean
  over the tokens, that counts as rounding, in nats; -1: that of `model.dtype`;
  0: no limit.

  Args:
    config: the config of the run.
    metrics: the metrics of the step.

  Raises:
    Disagreement: the mean is larger, or the 99th percentile is larger than 10
      times the limit, or one of them is nan.
  """
  limit, dtype = config.rollout.mismatch_limit, config.model.dtype
  source = f'rollout.mismatch_limit={limit:g}'
  if limit == -1:
    limit = _LIMITS[dtype]
    source = f'the limit for model.dtype={dtype}'
  mean, tail = metrics[_MEAN], metrics[_TAIL]
  if limit == 0 or (mean <= limit and tail <= _TAIL_PER_MEAN * limit):
    return
  enough = max(mean, tail / _TAIL_PER_MEAN)
  raise Disagreement(
    'the engine and the trainer do not compute the same policy: on the first '
    f'step, {_MEAN} is {mean:.3g} (at most {limit:g}) and {_TAIL} is '
    f'{tail:.3g} (at most {_TAIL_PER_MEAN * limit:g}), by {source}; nothing '
    'was updated. If that is rounding, for example because the engine computes '
    'in another dtype, set rollout.mismatch_limit above '
    f'{enough:.3g}; 0 = no limit'
  )
