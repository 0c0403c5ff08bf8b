"""Shows the alarms of a run, and ends it at those that the config names.

`records/alarms.py` has the rules, the section `alarms` of the config has the
thresholds. How long an alarm has rung is not saved: a run that is resumed
counts from there.
"""

from collections.abc import Callable
from collections.abc import Mapping

from stppo_jax import exits
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.records import alarms

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
    show: prints a line.
  """

  def __init__(
    self, config, hosts: hosts_lib.Hosts, show: Callable[[str], None]
  ):
    options = config.alarms.to_dict()
    self._stop: tuple[str, ...] = tuple(options.pop('stop'))
    self._stop_after: int = options.pop('stop_after')
    self._thresholds: dict[str, float] = options
    self._hosts, self._show = hosts, show
    # Alarm that rings -> the number of steps in a row in which it has rung.
    self._rung: dict[str, int] = {}
    # Alarm that was shown -> the number of steps since it rang last.
    self._told: dict[str, int] = {}
    self._lines: list[str] = []

  def measure(self, metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics `alarm/{name}` of a step, from its other metrics."""
    rings = alarms.check(metrics, self._thresholds)
    before, self._rung = self._rung, {}
    self._lines = []
    for name, is_ringing in rings.items():
      if is_ringing:
        self._rung[name] = before[name] + 1 if name in before else 1
        if name not in self._told:
          self._lines.append(f'ALARM {alarms.describe(name, metrics)}')
        self._told[name] = 0
      elif name in self._told:
        self._told[name] += 1
        if self._told[name] == _SILENT_STEPS:
          self._lines.append(f'alarm {name}: over')
          del self._told[name]
    return {alarms.PREFIX + name: float(ring) for name, ring in rings.items()}

  def check(self, step: int) -> None:
    """Shows which alarms have begun or ended; call it after the step is saved.

    Args:
      step: the number of steps that are done.

    Raises:
      Alarmed: on all hosts, if one of `alarms.stop` rang for too long.
    """
    if self._hosts.is_first:
      for line in self._lines:
        self._show(f'step {step}: {line}')
    if not self._stop:
      return
    due = [
      name
      for name, count in self._rung.items()
      if name in self._stop and count >= self._stop_after
    ]
    due, *_ = self._hosts.exchange('alarms', due)
    if due:
      raise Alarmed(
        f'the run ends at step {step}: alarm {due[0]} has rung in '
        f'{self._stop_after} steps in a row, and alarms.stop names it; '
        f'{alarms.ALARMS[due[0]].advice} Then the same command goes on. With '
        "--config.alarms.stop='()' it goes on whatever alarms ring"
      )
