"""Turns what updates returned into numbers."""

from collections.abc import Sequence
import functools

import jax
import numpy as np

from stppo_jax.learner import loss as loss_lib
from stppo_jax.rl import diagnostics as diagnostics_lib


def summarize(outputs: Sequence[loss_lib.LossOutputs]) -> dict[str, float]:
  """Returns the metrics of a step: means over its updates, ratios pooled."""
  metrics, diagnostics = zip(*jax.device_get(outputs))
  means = {
    name: float(np.mean([update[name] for update in metrics]))
    for name in metrics[0]
  }
  pooled = functools.reduce(diagnostics_lib.merge, diagnostics)
  return means | diagnostics_lib.summarize(pooled)


def exceeds_kl(update: loss_lib.LossOutputs, limit: float) -> bool:
  """Returns whether an update's KL estimate is above a limit.

  The estimate is the metric `actor/ppo_kl`, in nats per token. A limit of 0 is
  no limit.
  """
  return 0 < limit < summarize([update])['actor/ppo_kl']
