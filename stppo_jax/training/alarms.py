"""The alarms of a run: rules over the metrics of one step.

A rule reads numbers that are measured anyway and compares one of them with a
threshold, the key of the same name in the section `alarms` of a config. The
metric `alarm/{name}` is 1 in a step in which the alarm rings, and 0 in other
steps. A step without the number has no such metric either: without a value
model, for example, a run has no explained variance.
"""

from collections.abc import Callable, Mapping
import logging
import math
from typing import Any, NamedTuple

from stppo_jax import exits
from stppo_jax.parallel import hosts as hosts_lib

_log = logging.getLogger(__name__)

PREFIX = 'alarm/'
# Fewer searches than this may find nothing by chance.
_FEWEST_SEARCHES = 10
Metrics = Mapping[str, Any]


class Alarm(NamedTuple):
  """A rule over the metrics of a step.

  Attributes:
    number: returns what is compared with the threshold; None if it is absent.
    meaning: what that number is, with the names of its metrics.
    is_floor: whether the alarm rings below the threshold; otherwise above it.
    advice: what to do about it, in one sentence.
  """

  number: Callable[[Metrics], float | None]
  meaning: str
  is_floor: bool
  advice: str


def _metric(name: str) -> Callable[[Metrics], float | None]:
  return lambda metrics: metrics.get(name)


def _share(
  part: str, whole: str, *, fewest: int = 1
) -> Callable[[Metrics], float | None]:
  """Returns a function for part / whole; None if whole is below `fewest`."""

  def number(metrics: Metrics) -> float | None:
    count, total = metrics.get(part), metrics.get(whole)
    if count is None or total is None or total < fewest:
      return None
    return count / total

  return number


def _failed(metrics: Metrics) -> float | None:
  valid = metrics.get('rollout/valid_fraction')
  return None if valid is None else 1.0 - valid


ALARMS: Mapping[str, Alarm] = {
  'repetition': Alarm(
    _share('rollout/repeated_tokens', 'rollout/policy_tokens'),
    'the share of repeated text (rollout/repeated_tokens)',
    False,
    'read the dialogues: a policy that writes the same again and again is '
    'collapsing; go back to an earlier checkpoint with a smaller '
    'policy_optimizer.learning_rate or fewer updates.num_epochs.',
  ),
  'entropy': Alarm(
    _metric('actor/entropy'),
    'the entropy (actor/entropy)',
    True,
    'the policy hardly explores any more: raise loss.entropy_coefficient or '
    'lower policy_optimizer.learning_rate, unless its score is as good as you '
    'need.',
  ),
  'turn_ratio': Alarm(
    _metric('ratio/turn/max'),
    'the largest ratio of a turn (ratio/turn/max)',
    False,
    'the updates of a step go too far from the policy that collected: lower '
    'policy_optimizer.learning_rate or updates.num_epochs, or set '
    'updates.kl_stop.',
  ),
  'zero_variance': Alarm(
    _metric('rollout/zero_variance_groups'),
    'the share of groups without variance (rollout/zero_variance_groups)',
    False,
    'groups of equal rewards teach nothing: use questions of another '
    'difficulty, larger groups (rollout.group_size), or '
    'rollout.resample_rounds.',
  ),
  'explained_variance': Alarm(
    _metric('critic/vf_explained_var'),
    'the explained variance of the value model (critic/vf_explained_var)',
    True,
    'the value model is worse than a constant and adds noise to the '
    'advantages: lower value_optimizer.learning_rate, or set '
    'loss.value_warmup_steps.',
  ),
  'empty_answers': Alarm(
    _share('retrieval/empty', 'retrieval/answers', fewest=_FEWEST_SEARCHES),
    'the share of searches that found nothing (retrieval/empty)',
    False,
    'see with `doctor retriever` whether the retriever serves the corpus of '
    'these questions.',
  ),
  'finish_ratio': Alarm(
    _metric('env/finish_ratio'),
    'the share of trajectories that ended with an answer (env/finish_ratio)',
    True,
    'read the dialogues: if they are cut off, raise env.max_length, '
    'env.max_turn_tokens or env.max_turns; otherwise the policy has forgotten '
    'how to answer.',
  ),
  'search_rate': Alarm(
    _metric('env/number_of_valid_search'),
    'the number of searches per trajectory (env/number_of_valid_search)',
    True,
    'the policy answers from memory: see whether a search pays (turn rewards, '
    'env.rewards.search_penalty), and whether its start could search.',
  ),
  'kl': Alarm(
    _metric('critic/kl'),
    'the divergence from the reference per token (critic/kl)',
    False,
    'the policy has moved far from its start: raise algorithm.kl.coefficient '
    'or lower policy_optimizer.learning_rate.',
  ),
  'infrastructure': Alarm(
    _failed,
    'the share of trajectories that failed because of the infrastructure '
    '(rollout/valid_fraction)',
    False,
    'look at retrieval/failures and at the log of the retriever or the engine.',
  ),
}


def check(metrics: Metrics, thresholds: Mapping[str, float]) -> dict[str, bool]:
  """Returns whether each alarm rings, without those that have no number.

  Args:
    metrics: the metrics of a step by name.
    thresholds: the threshold of every alarm by its name.
  """
  rings = {}
  for name, alarm in ALARMS.items():
    number = alarm.number(metrics)
    # A comparison with nan is false, which would look like a step without
    # alarm.
    if number is not None and not math.isnan(number):
      limit = thresholds[name]
      rings[name] = number < limit if alarm.is_floor else number > limit
  return rings


def describe(name: str, metrics: Metrics) -> str:
  """Returns the line of an alarm that rings in a step."""
  alarm = ALARMS[name]
  number = alarm.number(metrics)
  least = metrics.get('critic/score/min')
  is_constant = least is not None and least == metrics.get('critic/score/max')
  if name == 'explained_variance' and is_constant:
    # Returns of constant rewards hardly vary, so their explained variance says
    # nothing.
    return (
      f'{name}: all rewards of the step are equal, so the value model has '
      'nothing to learn; use questions that the policy answers now and then, '
      'or a better start (model.path, init_from).'
    )
  relation = 'below' if alarm.is_floor else 'above'
  shown = 'unknown' if number is None else f'{number:.3g}'
  return (
    f'{name}: {alarm.meaning} is {shown}, {relation} alarms.{name}; '
    f'{alarm.advice}'
  )


def recorded(metrics: Metrics) -> list[str]:
  """Returns the lines of the alarms that rang in a step that was written."""
  return [
    f'alarm {describe(name, metrics)}'
    for name in ALARMS
    if metrics.get(PREFIX + name)
  ]


# An alarm has ended after so many silent steps. If one were enough, a number
# near its threshold would begin and end an alarm at every step.
_SILENT_STEPS = 5


class Alarmed(exits.RunEnded):
  """An alarm rang for so long that the run ends."""

  exit_code = exits.ENDED


class Alarms:
  """Watches the metrics of the steps of a run.

  Args:
    config: the config of the run.
    hosts: the hosts of the run; the first one has the metrics of all.
  """

  def __init__(self, config, hosts: hosts_lib.Hosts):
    options = config.alarms.to_dict()
    self._stop: tuple[str, ...] = tuple(options.pop('stop'))
    self._stop_after: int = options.pop('stop_after')
    self._thresholds: dict[str, float] = options
    self._hosts = hosts
    # Alarm that rings -> the number of steps in a row in which it has rung.
    self._rung: dict[str, int] = {}
    # Alarm that was shown -> the number of steps since it rang last.
    self._told: dict[str, int] = {}
    self._lines: list[str] = []

  def measure(self, metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics `alarm/{name}` of a step, from its other metrics."""
    rings = check(metrics, self._thresholds)
    # An alarm that is silent in this step is dropped, so that it counts from
    # one when it rings again: only steps in a row can end a run.
    before, self._rung = self._rung, {}
    self._lines = []
    for name, is_ringing in rings.items():
      if is_ringing:
        self._rung[name] = before[name] + 1 if name in before else 1
        if name not in self._told:
          self._lines.append(f'ALARM {describe(name, metrics)}')
        self._told[name] = 0
      elif name in self._told:
        self._told[name] += 1
        if self._told[name] == _SILENT_STEPS:
          self._lines.append(f'alarm {name}: over')
          del self._told[name]
    return {PREFIX + name: float(ring) for name, ring in rings.items()}

  def check(self, step: int) -> None:
    """Shows which alarms have begun or ended; call it after the step is saved.

    Args:
      step: the number of steps that are done.

    Raises:
      Alarmed: on all hosts, if one of `alarms.stop` rang for too long.
    """
    if self._hosts.is_first:
      for line in self._lines:
        _log.info(f'step {step}: {line}')
    if not self._stop:
      return
    due = [
      name
      for name, count in self._rung.items()
      if name in self._stop and count >= self._stop_after
    ]
    # The first host has the metrics of all, and decides for them.
    due, *_ = self._hosts.exchange('alarms', due)
    if due:
      raise Alarmed(
        f'the run ends at step {step}: alarm {due[0]} has rung in '
        f'{self._stop_after} steps in a row, and alarms.stop names it; '
        f'{ALARMS[due[0]].advice} Then the same command goes on. With '
        "--config.alarms.stop='()' no alarm ends the run"
      )
