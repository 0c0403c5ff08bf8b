"""Represents the processes of a run, on one machine or on several machines.

A *host* is one process with its devices. The Python code of the hosts agrees
through the coordinator (see `coordinator`), outside of compiled programs. So a
host hears of an error or a signal on another host even while its own devices
are busy.

No host goes on without the other hosts: if a host fails, every host prints the
name of that host and ends. If the main thread of a process waits for the lost
host in a compiled program, another thread ends the process.

With `mesh.collectors`, the last hosts of a run only collect trajectories, and
the other hosts learn. The hosts that learn form one `Group`, and the hosts that
only collect form another. A host that learns treats its group as if it were the
whole run: the mesh has the devices of the group, and only the group votes.
Signals and failures concern all hosts of the run.
"""

from collections.abc import Callable, Sequence
from typing import Any

from stppo_jax import exits


class HostFailed(Exception):
  """Says that another host has failed; the message gives host and cause.

  Attributes:
    exit_code: the exit code of the failed host; 75 if it was killed.
    saves: whether the hosts can still save the last finished step.
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
  """The hosts of a run, as one of the hosts sees them.

  This class is for a run with a single host. `ConnectedHosts` and `Group` are
  the subclasses for several hosts.

  Attributes:
    index: the number of this host.
    count: the number of hosts.
    names: the name of each host's machine.
    on_stop: function that is called, on another thread, after a stop or a
      failure. It must make this host abandon work that can be repeated.
    collectors: the number of hosts that only collect.
    learns: whether this host learns; False if it only collects.
    whole: the object for all hosts of the run; this object itself if it is not
      a `Group`.
    reached_at: the name or address at which other hosts reach this host.
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
    """The hosts with the same task as this host: to learn, or only to collect.

    If all hosts of the run learn, these are all hosts.
    """
    return self

  @property
  def is_alone(self) -> bool:
    """Whether the run has only this host."""
    return self.whole.count == 1

  @property
  def is_first(self) -> bool:
    """Whether this host writes the files that all hosts share."""
    return self.index == 0

  def exchange(
    self, what: str, value: Any, *, timeout: float | None = None
  ) -> list[Any]:
    """Waits for a value from every host, and returns the values in order.

    Args:
      what: the name of the value, the same on all hosts.
      value: this host's value, which must be serialisable as JSON.
      timeout: seconds to wait; None: until the coordinator fails the run
        because a host is late.

    Raises:
      HostFailed: another host has failed, or is too late.
      TimeoutError: another host did not come within `timeout`.
      Interrupted: `what` is `coordinator.PROGRAM`, and a host has called
        `stop`.
    """
    del what, timeout
    return [value]

  def gather(self, what: str, value: Any) -> list[Any] | None:
    """Returns the values of all hosts on the first host, and None elsewhere.

    Args:
      what, value: see `exchange`.
    """
    return self.exchange(what, value)

  def share(self, size: int) -> slice:
    """Returns this host's slice of `size` items.

    The slices of two hosts differ by at most one item in length.
    """
    return share(size, self.index, self.count)

  def describe(self, index: int) -> str:
    """Returns the number of a host and the name of its machine, as text."""
    return f'host {index} ({self.names[index]})'

  def stop(self) -> None:
    """Asks all hosts to abandon work that can be repeated; see `voting`."""

  def diagnose(self, error: BaseException) -> BaseException:
    """Returns the cause of an error of this host.

    The cause is the failure of another host, or else `error` itself.
    """
    return error


ALONE = Hosts()


class Group(Hosts):
  """Stands for the hosts that learn, or for the hosts that only collect.

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
    """Whether this host writes the shared files; False if it only collects."""
    return self.whole.is_first

  def exchange(
    self, what: str, value: Any, *, timeout: float | None = None
  ) -> list[Any]:
    """Returns the values of this group's hosts; see `Hosts.exchange`."""
    return self.whole.exchange(
      what, value, timeout=timeout, among=self._members
    )

  def gather(self, what: str, value: Any) -> list[Any] | None:
    """Returns the group's values on its first host; see `Hosts.gather`."""
    return self.whole.gather(what, value, among=self._members)

  def describe(self, index: int) -> str:
    """Returns the number and the machine of a host of the group, as text."""
    return self.whole.describe(self._members[index])

  def stop(self) -> None:
    """Asks all hosts of the run, not only this group; see `Hosts.stop`."""
    self.whole.stop()

  def diagnose(self, error: BaseException) -> BaseException:
    """Returns the cause of an error of this host; see `Hosts.diagnose`."""
    return self.whole.diagnose(error)


def describe(error: BaseException) -> str:
  """Returns the type and the message of an error as one line."""
  return ' '.join(f'{type(error).__name__}: {error}'.split())


def share(size: int, index: int, count: int) -> slice:
  """Returns the slice of `size` items that belongs to host `index` of `count`.

  The slices of all hosts have nearly the same length, and cover all items.
  """
  return slice(index * size // count, (index + 1) * size // count)
