"""Collects a step: repeats after outages, refills failed rows, replaces groups.

A trajectory that failed because of the infrastructure has no weight in the
update. With `rollout.refill_rounds` it is collected again with the same keys.
So the result is the trajectory that there would have been without the failure.

A group whose rewards are all equal has advantages of 0. With
`rollout.resample_rounds` such groups are replaced by groups of further
questions (dynamic sampling of DAPO, arXiv 2503.14476). Shapes are static, so
every round collects as many groups as the step has. If too few of these groups
have rewards that differ, the remaining groups are replaced by groups of the
same round whose rewards are equal too.

Each of several hosts collects some whole groups of every step. Which groups a
host collects depends only on the number of hosts. Each host replaces its own
groups, and collects its own failed rows again. No host waits for another here,
except if one engine spans all hosts. Later, `complete_metrics` computes the
metrics of the trajectories of all hosts.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import logging
from typing import NamedTuple

import jax
import numpy as np

from stppo_jax import exits
from stppo_jax import keys
from stppo_jax import types
from stppo_jax.data import questions as questions_lib
from stppo_jax.envs import protocol as envs
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.records import trajectory_metrics
from stppo_jax.retrieval import protocol
from stppo_jax.rollout import collect
from stppo_jax.rollout import event_loop
from stppo_jax.rollout import gathering
from stppo_jax.rollout import pack

_log = logging.getLogger(__name__)

# The same questions are collected at most this many times, if the retriever is
# ready but still fails queries.
_MAX_COLLECTIONS = 3

Groups = list[list[types.Trajectory]]
_lacks_variance = trajectory_metrics.zero_variance


@dataclasses.dataclass(frozen=True)
class Services:
  """The services that run beside the policy.

  Attributes:
    questions: the data set.
    environment: opens the dialogues and answers the policy's turns.
    retriever: the client of the retrieval server; None if the environment needs
      none.
    loop: the event loop on which the environment and its clients run.
  """

  questions: questions_lib.Questions
  environment: envs.Environment
  retriever: protocol.Server | None
  loop: event_loop.EventLoop


class Collection(NamedTuple):
  """Holds the groups of a step that this host has collected.

  Attributes:
    groups: the groups to train on.
    first: the groups before some of them were replaced.
    counts: counts by name, which `gathering.joined` joins over the hosts.
  """

  groups: Groups
  first: Groups
  counts: dict[str, float]


class Outage(exits.RunEnded):
  """Raised if the retriever is ready, but fails too many queries of a step."""


def collect_until_valid(
  collect_once: Callable[[], list[types.Trajectory]],
  services: Services,
  *,
  min_valid_fraction: float,
  what: str,
) -> list[types.Trajectory]:
  """Collects trajectories, again and again while too many of them failed.

  Failures are logged. Before each repetition the function waits until the
  retriever is ready.

  Args:
    collect_once: returns the same trajectories in every call, apart from
      failures.
    services: the retriever and its event loop.
    min_valid_fraction: the least share of the trajectories that must succeed,
      and the least share of the turns of each action that must succeed.
    what: the name of the collection, with which log lines begin.

  Raises:
    RetrieverUnreachable, Outage: if the retriever does not recover.
    RetrieverMisconfigured: if waiting cannot help.
  """
  # The whole step is collected again, with the same keys. If trajectories from
  # the outage were kept, the step would differ from the same step of a run
  # without an outage.
  failures = None
  for _ in range(_MAX_COLLECTIONS):
    trajectories = collect_once()
    failures = trajectory_metrics.failures(trajectories)
    if failures.fraction < 1 and 1 - failures.fraction >= min_valid_fraction:
      if failures.failed_rows:
        _log.info(f'{what}: {failures}')
      return trajectories
    _log.info(
      f'{what}: {failures}; all are collected again once the retriever, if '
      'any, is ready'
    )
    if services.retriever is not None:
      services.loop.run(services.retriever.wait_until_ready())
  raise Outage(
    f'{what}: collected {_MAX_COLLECTIONS} times; {failures}; earlier steps '
    'are saved, and the same command resumes the run'
  )


class StepCollector:
  """Collects steps; the result depends only on config, step and policy.

  Args:
    config: the config of the run.
    services: the questions, the environment and the retriever.
    collector: samples `rollout.group_size` trajectories of each question.
    hosts: the hosts of the run.
  """

  def __init__(
    self,
    config,
    services: Services,
    collector: collect.Collector,
    hosts: hosts_lib.Hosts = hosts_lib.ALONE,
  ):
    self._seed = config.seed
    self._config = config.rollout
    self._services = services
    self._collector = collector
    self._hosts = hosts
    # The groups of each step are kept until `complete_metrics` is called for
    # the step. A later step may be collected before that call.
    self._first_groups: dict[int, Groups] = {}

  def collect(
    self, step: int
  ) -> tuple[list[types.Trajectory], dict[str, float]]:
    """Returns the trajectories to train on, group after group, and metrics.

    With several hosts, the trajectories are this host's, and the metrics are
    only this host's counts. `complete_metrics` then returns all metrics.

    The metrics of `trajectory_metrics` describe the groups before any group is
    replaced. Replacement drops questions that are easy or hopeless, so the
    scores of the final groups are not the policy's scores, and cannot be
    compared with other runs.

    Raises:
      RetrieverUnreachable, Outage: if the retriever does not recover.
    """
    collected = self.collect_groups(step)
    trajectories = rows(collected.groups)
    if self._hosts.count > 1:
      self._first_groups[step] = collected.first
      return trajectories, collected.counts
    metrics = _measure(collected.first, self._services.environment)
    staleness = trajectory_metrics.measure_staleness(trajectories, step)
    return trajectories, metrics | staleness | collected.counts

  @property
  def num_groups(self) -> int:
    """The number of groups of a step, over all hosts."""
    return self._config.trajectories_per_step // self._config.group_size

  def collect_groups(self, step: int) -> Collection:
    """Returns this host's groups of a step, and its counts."""
    groups, refilled = self._collect_round(step, 0)
    first = list(groups)  # a copy: groups are replaced in the list `groups`
    counts = self._replace_groups(groups, step, refilled=refilled)
    self._collector.finish()
    counts |= trajectory_metrics.count_tokens(rows(first))
    counts |= self.statistics()
    return Collection(groups, first, counts)

  def complete_metrics(
    self, metrics: dict[str, float], step: int
  ) -> dict[str, float]:
    """Returns the metrics of a step; on the first host, over all hosts.

    All hosts call this method after `collect`, with the metrics that `collect`
    has returned. On the first host, the result describes the trajectories of
    all hosts. On any other host, it describes the trajectories of that host.
    """
    if self._hosts.count == 1:
      return metrics
    first = self._first_groups.pop(step)
    environment = self._services.environment
    return measured(self._hosts, first, metrics, step, environment)

  def statistics(self) -> dict[str, float]:
    """Returns the counts of retriever and engine since the last call."""
    retriever = self._services.retriever
    counted = {} if retriever is None else retriever.statistics()
    return {**counted, **self._collector.statistics()}

  def _replace_groups(
    self, groups: Groups, step: int, *, refilled: int
  ) -> dict[str, float]:
    """Replaces, in the list, groups whose rewards are equal; returns counts.

    Args:
      groups: the groups of round 0, some of which are replaced.
      step: the number of the step.
      refilled: the number of rows that were refilled in round 0.

    Returns:
      The numbers of rounds, of groups replaced by groups that need no
      replacement themselves, and of refilled rows.
    """
    places = [n for n, g in enumerate(groups) if _lacks_variance(g)]
    rounds = replaced = 0
    while places and rounds < self._config.resample_rounds:
      rounds += 1
      new_groups, new_refilled = self._collect_round(step, rounds)
      refilled += new_refilled
      uniform = [group for group in new_groups if _lacks_variance(group)]
      varied = [group for group in new_groups if not _lacks_variance(group)]
      # A round has as many groups as a whole step, so there is a group for
      # every group to be replaced.
      for place, group in zip(places, [*varied, *reversed(uniform)]):
        groups[place] = group
      replaced += min(len(varied), len(places))
      places = places[len(varied) :]
    return {
      'rollout/resample_rounds': float(rounds),
      'rollout/resampled_groups': float(replaced),
      'rollout/refilled_rows': float(refilled),
    }

  def _collect_round(
    self, step: int, resample_round: int
  ) -> tuple[Groups, int]:
    """Returns the groups of a round, and the number of refilled rows.

    Round 0 has the step's own questions. If the infrastructure failed too many
    trajectories, the same questions are collected again, with the same keys,
    once the retriever is ready.
    """
    config = self._config
    size = config.group_size
    questions = self._services.questions.train(
      step, self.num_groups, resample_round=resample_round
    )
    share = self._hosts.share(len(questions))
    questions = questions[share]
    # A row's key follows from its index among the rows of all hosts, so that no
    # trajectory depends on the number of hosts.
    row_keys = keys.row_keys(
      self._key(step, resample_round), share.start * size, len(questions) * size
    )
    trajectories = collect_until_valid(
      lambda: self._collector.collect(questions, row_keys),
      self._services,
      min_valid_fraction=config.min_valid_fraction,
      what=f'step {step + 1}',
    )
    trajectories, refilled = self._refill(
      trajectories, questions, row_keys, step
    )
    groups = [
      trajectories[n : n + size] for n in range(0, len(trajectories), size)
    ]
    return groups, refilled

  def _refill(
    self,
    trajectories: list[types.Trajectory],
    questions: Sequence[types.Question],
    row_keys: jax.Array,
    step: int,
  ) -> tuple[list[types.Trajectory], int]:
    """Collects failed trajectories again, in at most `refill_rounds` rounds.

    The engine begins whole groups, so the valid rows of a group are generated
    again along with its failed rows. The first results of the valid rows are
    kept, and the new results of these rows are dropped.

    Returns:
      All trajectories, and the number of failed trajectories that a valid
      trajectory has replaced.
    """
    size, num_failed = self._config.group_size, _num_failed(trajectories)
    filled = list(trajectories)
    for _ in range(self._config.refill_rounds):
      failed = [n for n, t in enumerate(filled) if not t.is_valid]
      if not failed:
        break
      groups = sorted({row // size for row in failed})
      rows = [group * size + n for group in groups for n in range(size)]
      again = self._collector.collect(
        [questions[group] for group in groups], row_keys[np.array(rows)]
      )
      for row, trajectory in zip(rows, again, strict=True):
        if not filled[row].is_valid:
          filled[row] = trajectory
    refilled = num_failed - _num_failed(filled)
    if num_failed and self._config.refill_rounds:
      _log.info(
        f'step {step + 1}: {refilled} of {num_failed} failed trajectories were '
        'refilled'
      )
    return filled, refilled

  def _key(self, step: int, resample_round: int) -> jax.Array:
    if not resample_round:
      return keys.step_key(self._seed, step, keys.Purpose.COLLECT)
    key = keys.step_key(self._seed, step, keys.Purpose.RESAMPLE)
    return jax.random.fold_in(key, resample_round)


def build_sentences(config, tokenizer) -> pack.SentenceSplitter | None:
  """Returns a sentence splitter if the ratio is per sentence, else None."""
  if config.algorithm.ratio.level != 'sentence':
    return None
  return pack.SentenceSplitter(tokenizer.token_bytes())


def _num_failed(trajectories: Sequence[types.Trajectory]) -> int:
  return sum(not t.is_valid for t in trajectories)


def measured(
  hosts: hosts_lib.Hosts,
  groups: Groups,
  counts: Mapping[str, float],
  step: int,
  environment: envs.Environment,
) -> dict[str, float]:
  """Returns the metrics of a step that several hosts have collected.

  On the first host, the metrics describe the trajectories of all hosts. On any
  other host, they describe the trajectories of that host.

  Args:
    hosts: the hosts, all of which call this function.
    groups: this host's groups before any of them was replaced.
    counts: counts by name, which `gathering.joined` joins over the hosts.
    step: the number of the step.
    environment: computes the metrics of trajectories.
  """
  groups, joined = gathering.gather(hosts, groups, counts)
  staleness = trajectory_metrics.measure_staleness(rows(groups), step)
  return _measure(groups, environment) | staleness | joined


def _measure(groups: Groups, environment: envs.Environment) -> dict[str, float]:
  return trajectory_metrics.measure(
    rows(groups), environment
  ) | trajectory_metrics.measure_groups(groups)


def rows(groups: Sequence[Sequence[types.Trajectory]]):
  """Returns the trajectories of all groups, one group after the other."""
  return [trajectory for group in groups for trajectory in group]
