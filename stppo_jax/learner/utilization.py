"""Turns what the updates of a step returned into metrics."""

from collections.abc import Sequence
import functools
from typing import NamedTuple

import jax
import numpy as np

from stppo_jax.learner import step as step_lib
from stppo_jax.rl import diagnostics as diagnostics_lib


class Counts(NamedTuple):
  """Operations of a batch, counted by `models.operations`.

  Attributes:
    policy: operations of a forward pass of the policy.
    value: operations of a forward pass of a value model.
    policy_again, value_again: what their backward passes compute again.
  """

  policy: float
  value: float
  policy_again: float
  value_again: float


def shares(
  counts: Counts,
  *,
  peak_operations: float,
  has_value_model: bool,
  trains_adapters: bool,
  extra_pass: bool,
) -> dict[str, float]:
  """Returns `perf/mfu` and `perf/hfu` of an epoch.

  The first counts what the formulas need, the second also what is computed
  again because it was not kept.

  Args:
    counts: the operations of the batch.
    peak_operations: operations that the devices do at their peak in the time of
      an epoch.
    has_value_model: whether the value model has a backbone of its own.
    trains_adapters: whether the weights of the backbone are frozen.
    extra_pass: whether one more forward pass of the policy collects statistics
      of the minibatch.
  """
  # A backward pass has a product for the gradient of the input and one for that
  # of the weights, which frozen weights do not need.
  passes = 2 if trains_adapters else 3
  needed = passes * (counts.policy + counts.value * has_value_model)
  again = counts.policy_again + counts.value_again * has_value_model
  again += counts.policy * extra_pass
  return {
    'perf/mfu': needed / peak_operations,
    'perf/hfu': (needed + again) / peak_operations,
  }


def summarize(outputs: Sequence[step_lib.LossOutputs]) -> dict[str, float]:
  """Returns the metrics of a step: means over its updates, ratios pooled."""
  metrics, diagnostics = zip(*jax.device_get(outputs))
  means = {
    name: float(np.mean([update[name] for update in metrics]))
    for name in metrics[0]
  }
  pooled = functools.reduce(diagnostics_lib.merge, diagnostics)
  return means | diagnostics_lib.summarize(pooled)


def exceeds_kl(update: step_lib.LossOutputs, limit: float) -> bool:
  """Returns whether an update's KL estimate is above a limit.

  The estimate is the metric `actor/ppo_kl`, in nats per token. A limit of 0 is
  no limit.
  """
  return 0 < limit < summarize([update])['actor/ppo_kl']
