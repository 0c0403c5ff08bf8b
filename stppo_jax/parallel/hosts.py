"""Shows a process the other processes of its run, on one machine or many.

A *host* is one process with its devices. Python on the hosts agrees through the
coordinator (see `coordinator`), outside compiled programs, so that an error or
a signal of one host is heard while another is busy on its devices.

No host goes on without the others: a host that fails is named on all of them,
and all end. A process whose main thread waits for the lost host in a compiled
program is ended by another thread.

With `mesh.collectors` the last hosts of a run only collect, and the others
learn. The hosts that do the same are a `Group`. A host that learns treats its
group as if it were all hosts of the run: the mesh has the devices of the group,
and the group votes. Only signals and failures concern all hosts together.
"""

from collections.abc import Callable, Sequence
from typing import Any

from stppo_jax import exits


class HostFailed(Exception):
  """Says that another host has failed; the line names it and the cause.

  Attributes:
    exit_code: the exit code of the failed host; 75 if it was killed.
    saves: whether all hosts are in a state in which they can save the run.
  """

  def __init__(
    self,
    line: str,
    exit_code: int = exits.TRY_AGAIN,
    *,
    saves: bool = False,
  ):
    super().__init__(line)
    self.exit_code = exit_code
    self.saves = saves


class Hosts:
  """Stands for the only host of a run, which agrees with itself.

  Attributes:
    index: the number of this host.
    count: the number of hosts.
    names: the names of their machines.
    on_stop: called on another thread if all hosts are to abandon what they can.
    collectors: the number of hosts that only collect.
    learns: whether this host is none of them.
    whole: the hosts of the run, all of them.
    reached_at: the name or address at which other hosts reach this one.
  """

  collectors = 0
  learns = True
  reached_at = 'localhost'

  def __init__(self, index: int = 0, names: Sequence[str] = ('localhost',)):
    self.index = index
    self.count = len(names)
    self.names = list(names)
    self.on_stop: Callable[[], None] = lambda: None
    self.whole = self

  @property
  def group(self) -> 'Hosts':
    """The hosts that do what this one does."""
    return self

  @property
  def is_alone(self) -> bool:
    """Whether there is no other host, in any group, to agree with."""
    return self.whole.count == 1

  @property
  def is_first(self) -> bool:
    """Whether this host writes the files that all hosts share."""
    return self.index == 0

  def exchange(
    self, what: str, value: Any, *, timeout: float | None = None
  ) -> list[Any]:
    """Returns the values of all hosts, in order; waits for the last of them.

    Args:
      what: the name of the value, the same on all hosts.
      value: a value that JSON can write.
      timeout: seconds to wait; None: as long as hosts are waited for at all.

    Raises:
      HostFailed: another host has failed, or does not come.
      TimeoutError: another host does not come within `timeout`.
      Interrupted: all hosts abandon what they can, before a
        `coordinator.PROGRAM`.
    """
    del what, timeout
    return [value]

  def gather(self, what: str, value: Any) -> list[Any] | None:
    """Returns the values of all hosts to the first one, to others None."""
    return self.exchange(what, value)

  def share(self, size: int) -> slice:
    """Returns this host's part of a number of items; parts differ by one."""
    return share(size, self.index, self.count)

  def describe(self, index: int) -> str:
    """Returns the number of a host with the name of its machine."""
    return f'host {index} ({self.names[index]})'

  def stop(self) -> None:
    """Asks all hosts to abandon what they can and come to their next vote."""

  def diagnose(self, error: BaseException) -> BaseException:
    """Returns the failure of another host if it has caused an error."""
    return error


ALONE = Hosts()


class Group(Hosts):
  """Stands for the hosts of a run that learn, or for those that only collect.

  Args:
    whole: the hosts of the run.
    members: the numbers of the hosts of this group.
    learns: see `Hosts`.
  """

  def __init__(self, whole: Any, members: range, *, learns: bool):
    super().__init__(
      members.index(whole.index), [whole.names[n] for n in members]
    )
    self.whole, self.collectors = whole, whole.collectors
    self.learns = learns
    self._members = members

  @property
  def is_first(self) -> bool:
    """See `Hosts.is_first`; no host that only collects is the first one."""
    return self.whole.is_first

  def exchange(
    self, what: str, value: Any, *, timeout: float | None = None
  ) -> list[Any]:
    """See `Hosts.exchange`; the others do not take part in it."""
    return self.whole.exchange(
      what, value, timeout=timeout, among=self._members
    )

  def gather(self, what: str, value: Any) -> list[Any] | None:
    """See `Hosts.gather`."""
    return self.whole.gather(what, value, among=self._members)

  def describe(self, index: int) -> str:
    """See `Hosts.describe`."""
    return self.whole.describe(self._members[index])

  def stop(self) -> None:
    """See `Hosts.stop`; every host of the run is asked."""
    self.whole.stop()

  def diagnose(self, error: BaseException) -> BaseException:
    """See `Hosts.diagnose`."""
    return self.whole.diagnose(error)


def describe(error: BaseException) -> str:
  """Returns an error as one line."""
  return ' '.join(f'{type(error).__name__}: {error}'.split())


def share(size: int, index: int, count: int) -> slice:
  """Returns the part of host `index` of `count`; see `Hosts.share`."""
  return slice(index * size // count, (index + 1) * size // count)
