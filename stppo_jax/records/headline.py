"""Selects the few metrics that summarise a step."""

from collections.abc import Mapping
import math

_EVALUATION = 'val/'  # followed by the name of the score and of the data set
_MAIN = {
  'reward': 'critic/score/mean',
  'loss': 'sft/loss',
  'preference loss': 'preference/loss',
}


def evaluation(metrics: Mapping[str, float]) -> dict[str, float]:
  """Returns the evaluation score of a step; {} if there was no evaluation.

  The key of the dict is `val/{score}`, and its value is the mean of the score
  over the data sets.
  """
  scores = {k: v for k, v in metrics.items() if k.startswith(_EVALUATION)}
  if not scores:
    return {}
  # All sets of a run are evaluated by the same main score.
  name = '/'.join(next(iter(scores)).split('/')[:2])
  return {name: sum(scores.values()) / len(scores)}


def training(metrics: Mapping[str, float]) -> dict[str, float]:
  """Returns a dict from a short name to the reward or the loss of a step."""
  return {name: metrics[key] for name, key in _MAIN.items() if key in metrics}


def seconds(metrics: Mapping[str, float | None]) -> float | None:
  """Returns the seconds of a step plus the save before the step, or None.

  The seconds of compilation are not included. Of the save, only the seconds
  count in which the run waited. The result is None if the step's time is not
  among the metrics.
  """
  if (step := metrics.get('timing_s/step')) is None:
    return None
  # Threads compile in parallel, so the sum of their times may exceed the time
  # of the step.
  worked = max(step - (metrics.get('timing_s/compile') or 0.0), 0.0)
  return worked + (metrics.get('timing_s/checkpoint') or 0.0)


def mean_score(metrics: Mapping[str, float]) -> float | None:
  """Returns the mean score over the data sets that were evaluated.

  The result is None if the step had no evaluation, or if the score is not
  finite.
  """
  for score in evaluation(metrics).values():
    return score if math.isfinite(score) else None
  return None
