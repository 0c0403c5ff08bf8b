"""Calls the programs of an engine that spans all hosts of a slice.

Each host has its own slots, cache pages and schedule. But a program runs on the
devices of all hosts, so all hosts must call the same programs in the same
order. Before each call, every host tells the other hosts which program it
needs. All hosts then call the needed program that comes first in `_ORDER`. A
host that needs another program takes part without an active slot. The shapes of
the call are the largest that any host needs for this program.
"""

from collections.abc import Callable, Sequence
import contextlib
import time
from typing import Any

from stppo_jax.sampling import slot_calls
from stppo_jax.sampling import slot_driver

# A host waits if the observations of all its rows are still missing. A host is
# done if it has no rows.
_WAITS, _DONE = 'waits', 'done'
_ORDER = ('extend', 'copy', 'decode', _WAITS, _DONE)
# If all hosts wait, they exchange their calls again after this many seconds.
_PAUSE = 0.005

# A context manager that takes this host's value and yields the values of all
# hosts, see `voting.agreed`.
Agreed = Callable[[Any], contextlib.AbstractContextManager[list[Any]]]


class SliceDriver(slot_driver.SlotDriver):
  """Calls programs together with the other hosts.

  Args:
    programs, options: see `SlotDriver`.
    agreed: takes this host's value and yields the values of all hosts.
  """

  joins = True

  def __init__(self, programs, options, *, agreed: Agreed):
    super().__init__(programs, options)
    self._agreed = agreed

  def join(self, *, done: bool) -> bool:
    """Takes part in a program of other hosts, see `SlotDriver.join`."""
    mine = slot_calls.Call(_DONE if done else _WAITS)
    with self._agreed(mine) as calls:
      call = _merged(calls)
      self._call_for_others(call)
    if call.program == _WAITS:
      time.sleep(_PAUSE)
    return call.program == _DONE

  def _run(
    self, call: slot_calls.Call, function: Callable[[slot_calls.Call], Any]
  ) -> Any:
    # This host may take part in many programs of other hosts before its own
    # program comes first in `_ORDER`. Each of these programs advances the hosts
    # that need it. In the end no other host needs a program that comes earlier
    # than the program of this host, so the loop ends.
    while True:
      with self._agreed(call) as calls:
        merged = _merged(calls)
        if merged.program == call.program:
          return function(merged)
        self._call_for_others(merged)

  def _num_pages(self, slots, appended=0) -> int:
    # If programs run on all slots, their results must not depend on timing.
    # Another host may need more pages at any time, and would then select
    # another program for all hosts. So the program for the most pages is always
    # called.
    if self.compacts or self._programs.takes_any_number:
      return super()._num_pages(slots, appended)
    return self._programs.pages_per_row

  def _call_for_others(self, call: slot_calls.Call) -> None:
    """Takes part in a program without an active slot of this host."""
    weights = self._programs.weights
    assert weights is not None
    if call.program == 'extend':
      self._extend({}, 0, weights.params, call)
    elif call.program == 'copy':
      self._copy({}, call)
    elif call.program == 'decode':
      self._decode({}, weights.params, call)


def _merged(calls: Sequence[Sequence[Any]]) -> slot_calls.Call:
  """Returns the call that all hosts make, from the calls that hosts need."""
  program = min((call[0] for call in calls), key=_ORDER.index)
  needed = [slot_calls.Call(*call) for call in calls if call[0] == program]
  return slot_calls.Call(
    program,
    max(call.size for call in needed),
    max(call.num_pages for call in needed),
    # The program counts the ended turns of all hosts together.
    sum(call.enough for call in needed),
    any(call.greedy for call in needed),
  )
