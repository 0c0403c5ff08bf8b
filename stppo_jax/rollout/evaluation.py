"""Evaluates a policy on fixed questions that training never sees."""

import numpy as np

from stppo_jax import keys as keys_lib
from stppo_jax import types
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.rollout import collect
from stppo_jax.rollout import steps


class Evaluator:
  """Evaluates policies, always on the same evaluation questions.

  Args:
    config: the config of a run.
    services: the questions, the environment and the event loop.
    collector: samples one trajectory of each question.
    hosts: the hosts of the run, each of which evaluates a part of the
      questions.

  Attributes:
    questions: the questions by data set; {} if there are no evaluation
      questions.
  """

  def __init__(
    self,
    config,
    services: steps.Services,
    collector: collect.Collector,
    hosts: hosts_lib.Hosts = hosts_lib.ALONE,
  ):
    self._services, self._hosts = services, hosts
    self._min_valid_fraction = config.rollout.min_valid_fraction
    self.questions = services.questions.evaluation(
      config.evaluate.num_questions
    )
    self._collector = collector
    self._main_score = services.environment.main_score
    # Every evaluation uses the key of step 0, so that sampled evaluations at
    # two steps differ by the policy alone.
    self._key = keys_lib.step_key(config.seed, 0, keys_lib.Purpose.EVALUATE)

  def run(
    self, *, greedy: bool = True
  ) -> tuple[dict[str, float], list[types.Trajectory]]:
    """Returns the mean score of each data set, and this host's trajectories.

    The score is the main score of the environment, and the mean is over the
    trajectories of all hosts. The engine samples with the weights that were
    published last. Trajectories that failed because of the infrastructure are
    left out of the means. If too many trajectories failed, the evaluation is
    repeated once the retriever is ready.

    Args:
      greedy: whether to decode greedily instead of sampling.

    Raises:
      Exceptions of `steps.collect_until_valid`.
    """
    questions = [q for group in self.questions.values() for q in group]
    share = self._hosts.share(len(questions))
    questions = questions[share]
    # The key of a question follows from the question's index among the
    # questions of all hosts.
    keys = keys_lib.row_keys(self._key, share.start, len(questions))
    trajectories = []
    if questions:
      trajectories = steps.collect_until_valid(
        lambda: self._collector.collect(questions, keys, greedy=greedy),
        self._services,
        min_valid_fraction=self._min_valid_fraction,
        what='evaluation',
      )
    # A host without questions makes this call, too, because an engine that
    # spans hosts waits for all hosts.
    self._collector.finish()
    scored = [
      (t.question.data_set, float(t.scores[self._main_score]))
      for t in trajectories
      if t.is_valid
    ]
    scores: dict[str, list[float]] = {}
    for part in self._hosts.exchange('scores', scored):
      for data_set, score in part:
        scores.setdefault(data_set, []).append(score)
    means = {name: float(np.mean(values)) for name, values in scores.items()}
    return means, trajectories

  def measure(self) -> tuple[dict[str, float], list[types.Trajectory]]:
    """Evaluates greedily, and returns metrics and this host's trajectories."""
    scores, trajectories = self.run()
    metrics = {
      f'val/{self._main_score}/{data_set}': score
      for data_set, score in scores.items()
    }
    valid = sum(t.is_valid for t in trajectories)
    counts = self._hosts.exchange('valid', (valid, len(trajectories)))
    valid, total = map(sum, zip(*counts))
    if total:
      metrics['evaluate/valid_fraction'] = valid / total
    return metrics, trajectories
