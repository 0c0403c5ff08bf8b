"""The trajectories of a step: outages are waited for, idle groups replaced.

A group whose rewards are all equal has no advantage in it. With
`rollout.resample_rounds` such groups are replaced by groups of further
questions (dynamic sampling of DAPO, arXiv 2503.14476). Shapes are static: a
further round plays a whole collection of groups again, and where groups with
variance run out, the places left are filled with the last ones without.
"""

from collections.abc import Callable
from collections.abc import Sequence

import jax

from stppo_jax import types
from stppo_jax.learner import keys
from stppo_jax.records import trajectory_metrics
from stppo_jax.rollout import collect
from stppo_jax.training import assembly
from stppo_jax.training import interruption

_MAX_COLLECTIONS = 3  # of one round, by a retriever that answers but fails

Groups = list[list[types.Trajectory]]
_is_idle = trajectory_metrics.zero_variance


class StepCollector:
  """Collects steps; what it does is a function of (config, step, policy).

  Args:
    config: of the run.
    services: questions and retriever.
    collector: plays one question per group, `rollout.group_size` times.
    show: prints a line.
  """

  def __init__(
    self,
    config,
    services: assembly.Services,
    collector: collect.Collector,
    show: Callable[[str], None],
  ):
    self._seed = config.seed
    self._config = config.rollout
    self._services = services
    self._collector = collector
    self._show = show

  def collect(
    self, step: int
  ) -> tuple[list[types.Trajectory], dict[str, float]]:
    """The trajectories to train on, groups adjacent, and metrics.

    The metrics of `trajectory_metrics` are those of the step's first
    questions, before any group is replaced: replacing leaves out what is easy
    or hopeless, so that what is left scores neither like the policy nor like
    another run.

    Raises:
      RetrieverUnreachable, Outage: the retriever fails for good.
    """
    # Forgets the queries and turns of an evaluation.
    self._statistics()
    groups = self._play(step, 0)
    metrics = trajectory_metrics.measure(
      _rows(groups), self._services.environment
    )
    metrics |= trajectory_metrics.measure_groups(groups)
    metrics |= self._replace_idle(groups, step)
    rows = _rows(groups)
    metrics |= trajectory_metrics.measure_staleness(rows, step)
    return rows, metrics | self._statistics()

  def _statistics(self) -> dict[str, float]:
    """Returns what retriever and engine counted since the last call."""
    retriever = self._services.retriever
    counted = {} if retriever is None else retriever.statistics()
    return {**counted, **self._collector.statistics()}

  def _replace_idle(self, groups: Groups, step: int) -> dict[str, float]:
    """Replaces groups without variance, in place; how many, in what rounds."""
    places = [n for n, g in enumerate(groups) if _is_idle(g)]
    rounds = replaced = 0
    while places and rounds < self._config.resample_rounds:
      rounds += 1
      further = self._play(step, rounds)
      idle = [group for group in further if _is_idle(group)]
      varied = [group for group in further if not _is_idle(group)]
      # A round has as many groups as the step: enough for every place.
      for place, group in zip(places, [*varied, *reversed(idle)]):
        groups[place] = group
      replaced += min(len(varied), len(places))
      places = places[len(varied) :]
    return {
      'rollout/resample_rounds': float(rounds),
      'rollout/resampled_groups': float(replaced),
    }

  def _play(self, step: int, further: int) -> Groups:
    """Groups of the step's first (0) or further questions.

    Where the retriever failed too many, they have not been played: once it
    answers again, the same ones are played again.
    """
    config = self._config
    size = config.group_size
    questions = self._services.questions.train(
      step, config.trajectories_per_step // size, resample_round=further
    )
    row_keys = keys.row_keys(
      self._key(step, further), 0, config.trajectories_per_step
    )
    for _ in range(_MAX_COLLECTIONS):
      trajectories = self._collector.collect(questions, row_keys)
      valid = trajectory_metrics.valid_fraction(trajectories)
      if valid > 0 and valid >= config.min_valid_fraction:
        return [
          trajectories[n : n + size] for n in range(0, len(trajectories), size)
        ]
      self._show(
        f'step {step + 1}: the infrastructure failed {1 - valid:.0%} of the '
        'trajectories; they are collected again when the retriever is ready'
      )
      if self._services.retriever is not None:
        self._services.loop.run(self._services.retriever.wait_until_ready())
    raise interruption.Outage(
      f'step {step + 1}: the retriever answers, yet {1 - valid:.0%} of '
      f'the trajectories failed in the last of {_MAX_COLLECTIONS} collections; '
      f'step {step} is saved, the same command resumes'
    )

  def _key(self, step: int, further: int) -> jax.Array:
    if not further:
      return keys.step_key(self._seed, step, keys.Purpose.COLLECT)
    key = keys.step_key(self._seed, step, keys.Purpose.RESAMPLE)
    return jax.random.fold_in(key, further)


def _rows(groups: Sequence[Sequence[types.Trajectory]]):
  return [trajectory for group in groups for trajectory in group]
