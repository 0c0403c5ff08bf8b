"""Evaluation on fixed questions that training never sees."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np

from stppo_jax import types
from stppo_jax.learner import keys as keys_lib
from stppo_jax.records import trajectory_metrics
from stppo_jax.rollout import collect
from stppo_jax.training import assembly
from stppo_jax.training import collection


class Evaluator:
  """Evaluates a policy on the evaluation questions, always the same ones.

  Args:
    config: the config of a run.
    services: questions, environment and event loop.
    collector: samples one trajectory of each question.
    show: prints a line about failures.

  Attributes:
    has_questions: whether the data set has questions to evaluate on.
  """

  def __init__(
    self,
    config,
    services: assembly.Services,
    collector: collect.Collector,
    show: Callable[[str], None] = print,
  ):
    self._services, self._show = services, show
    self._min_valid_fraction = config.rollout.min_valid_fraction
    self._questions = services.questions.evaluation(
      config.evaluate.num_questions
    )
    self.has_questions = bool(self._questions)
    self._collector = collector
    self._main_score = services.environment.main_score
    self._key = keys_lib.step_key(config.seed, 0, keys_lib.Purpose.EVALUATE)

  def run(
    self, *, greedy: bool = True
  ) -> tuple[dict[str, float], list[types.Trajectory]]:
    """Returns the mean main score by data set, and all trajectories.

    The policy is the one that was published last. Trajectories that the
    infrastructure failed count in no mean. If there are too many of them, the
    evaluation is repeated when the retriever is ready.

    Args:
      greedy: whether to decode greedily instead of sampling.

    Raises:
      Exceptions of `collection.collect_until_valid`.
    """
    questions = [q for group in self._questions.values() for q in group]
    keys = keys_lib.row_keys(self._key, 0, len(questions))
    trajectories = collection.collect_until_valid(
      lambda: self._collector.collect(questions, keys, greedy=greedy),
      self._services,
      min_valid_fraction=self._min_valid_fraction,
      what='evaluation',
      show=self._show,
    )
    scores: dict[str, list[float]] = {}
    for trajectory in trajectories:
      if trajectory.status is not types.TrajectoryStatus.INFRA_ERROR:
        name = trajectory.question.data_set
        scores.setdefault(name, []).append(trajectory.scores[self._main_score])
    means = {name: float(np.mean(values)) for name, values in scores.items()}
    return means, trajectories

  def metrics(
    self,
    scores: Mapping[str, float],
    trajectories: Sequence[types.Trajectory] = (),
  ) -> dict[str, float]:
    """Returns the scores of data sets by the names of their metrics.

    Args:
      scores: data set to score.
      trajectories: given, the share of them that is valid is a metric too.
    """
    metrics = {
      f'val/{self._main_score}/{data_set}': score
      for data_set, score in scores.items()
    }
    if trajectories:
      valid = trajectory_metrics.valid_fraction(trajectories)
      metrics['evaluate/valid_fraction'] = valid
    return metrics
