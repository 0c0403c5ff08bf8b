"""The alarms of a run: rules that watch the metrics of each step.

A rule computes one number from the other metrics of a step, and compares the
number with a threshold. In the section `alarms` of a config, the key with the
alarm's name has the threshold. The metric `alarm/{name}` is 1 in a step in
which the alarm rings, and 0 in other steps. If the metrics of a step do not
give the number, the step has no metric `alarm/{name}`: a run without a value
model, for example, has no explained variance.
"""

from collections.abc import Callable, Mapping
import logging
import math
from typing import Any, NamedTuple

from stppo_jax import exits
from stppo_jax.parallel import hosts as hosts_lib

_log = logging.getLogger(__name__)

PREFIX = 'alarm/'
# In a step with fewer searches than this number, most of the searches may find
# nothing by chance.
_FEWEST_SEARCHES = 10
Metrics = Mapping[str, Any]


class Alarm(NamedTuple):
  """A rule over the metrics of a step.

  Attributes:
    number: takes the metrics of a step, and returns the number that is compared
      with the threshold, or None if the metrics do not give the number.
    meaning: a phrase that says what the number is and names its metric.
    is_floor: whether the alarm rings for a number below the threshold. If
      False, the alarm rings for a number above the threshold.
    advice: a sentence that tells the user what to do when the alarm rings.
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
  """Returns a function that divides the metric `part` by the metric `whole`.

  The function returns None if a metric is missing, or if `whole` is below
  `fewest`.
  """

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
    'the updates of a step move the policy too far from the policy that '
    'collected the step: lower policy_optimizer.learning_rate or '
    'updates.num_epochs, or set updates.kl_stop.',
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
    'env.rewards.search_penalty), and whether the policy could search when '
    'training began.',
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
  """Returns, for each alarm that has a number in this step, whether it rings.

  Args:
    metrics: the metrics of a step by name.
    thresholds: the threshold of every alarm by its name.
  """
  rings = {}
  for name, alarm in ALARMS.items():
    number = alarm.number(metrics)
    # A nan is left out. Every comparison with nan is false, so a nan would look
    # like a number for which the alarm does not ring.
    if number is not None and not math.isnan(number):
      limit = thresholds[name]
      rings[name] = number < limit if alarm.is_floor else number > limit
  return rings


def describe(name: str, metrics: Metrics) -> str:
  """Returns a line about an alarm that rings, with its number and its advice.

  If the explained variance says nothing, because all rewards of the step are
  equal, the line says so in place of the number.
  """
  alarm = ALARMS[name]
  number = alarm.number(metrics)
  least = metrics.get('critic/score/min')
  is_constant = least is not None and least == metrics.get('critic/score/max')
  if name == 'explained_variance' and is_constant:
    # If all rewards are equal, the returns that the value model predicts hardly
    # vary, so their explained variance says nothing about the value model.
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
  """Returns a line for each alarm that rang in the step with these metrics."""
  return [
    f'alarm {describe(name, metrics)}'
    for name in ALARMS
    if metrics.get(PREFIX + name)
  ]


# An alarm is over after this number of steps in which it did not ring. If one
# such step were enough, a number near its threshold could begin and end the
# alarm again and again.
_SILENT_STEPS = 5


class Alarmed(exits.RunEnded):
  """An alarm has rung for so many steps in a row that the run ends."""

  exit_code = exits.ENDED


class Alarms:
  """Watches the metrics of the steps of a run.

  Args:
    config: the config of the run.
    hosts: the hosts of the run; the first host has the metrics of all hosts.
  """

  def __init__(self, config, hosts: hosts_lib.Hosts):
    options = config.alarms.to_dict()
    self._stop: tuple[str, ...] = tuple(options.pop('stop'))
    self._stop_after: int = options.pop('stop_after')
    self._thresholds: dict[str, float] = options
    self._hosts = hosts
    # For each alarm that rang in the last step: the number of steps in a row in
    # which it has rung.
    self._rung: dict[str, int] = {}
    # For each alarm that was shown and is not over: the number of steps since
    # it last rang.
    self._told: dict[str, int] = {}
    self._lines: list[str] = []

  def measure(self, metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics `alarm/{name}` of a step.

    Args:
      metrics: the other metrics of the step.
    """
    rings = check(metrics, self._thresholds)
    # An alarm that does not ring in this step is dropped from the counts, so
    # its count begins at 1 when it rings again: only steps in a row end a run.
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
    """Logs alarms that have begun or ended; raises if an alarm ends the run.

    Call this after `Run.finish_step`. If this method then raises, the end of
    the run still saves the step.

    Args:
      step: the number of steps that are done.

    Raises:
      Alarmed: on all hosts, if an alarm that `alarms.stop` names has rung in
        `alarms.stop_after` steps in a row.
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
    # The first host has the metrics of all hosts. So its `due` decides for all.
    due, *_ = self._hosts.exchange('alarms', due)
    if due:
      raise Alarmed(
        f'the run ends at step {step}: alarm {due[0]} has rung in '
        f'{self._stop_after} steps in a row, and alarms.stop names it; '
        f'{ALARMS[due[0]].advice} Then the same command goes on. With '
        "--config.alarms.stop='()' no alarm ends the run"
      )
