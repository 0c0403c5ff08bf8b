"""The metrics that describe a step in a few numbers."""

from collections.abc import Mapping
import math

_EVALUATION = 'val/'  # then the name of the score, then of the data set
_MAIN = {
  'reward': 'critic/score/mean',
  'loss': 'sft/loss',
  'preference loss': 'preference/loss',
}


def evaluation(metrics: Mapping[str, float]) -> dict[str, float]:
  """Returns the score of a step's evaluation by name; {} if it had none.

  It is the mean over data sets, as `val/{score}`.
  """
  scores = {k: v for k, v in metrics.items() if k.startswith(_EVALUATION)}
  if not scores:
    return {}
  # All sets of a run are evaluated by the same main score.
  name = '/'.join(next(iter(scores)).split('/')[:2])
  return {name: sum(scores.values()) / len(scores)}


def training(metrics: Mapping[str, float]) -> dict[str, float]:
  """Returns the reward of a step by name, or its loss if it has no reward."""
  return {name: metrics[key] for name, key in _MAIN.items() if key in metrics}


def seconds(metrics: Mapping[str, float | None]) -> float | None:
  """Returns the duration of a step with its save, without what it compiled."""
  if (step := metrics.get('timing_s/step')) is None:
    return None
  # Threads compile side by side, so their times may add up to more than the
  # time that has passed.
  worked = max(step - (metrics.get('timing_s/compile') or 0.0), 0.0)
  return worked + (metrics.get('timing_s/checkpoint') or 0.0)


def mean_score(metrics: Mapping[str, float]) -> float | None:
  """Returns the mean score over the data sets that were evaluated.

  None where nothing was evaluated, or where the score is not finite.
  """
  for score in evaluation(metrics).values():
    return score if math.isfinite(score) else None
  return None
