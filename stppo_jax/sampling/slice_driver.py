"""Calls the programs of an engine that spans all hosts of a slice.

Each host has slots and pages of its own, and a schedule of its own. But a
program runs on the devices of all hosts, so all of them must call the same
programs in the same order. Before each call, every host tells which program it
needs. All hosts call the first of these in `_ORDER`; a host that did not ask
for it takes part with no slot. Its shapes are those of the host that needs the
largest.
"""

from collections.abc import Callable, Sequence
import contextlib
import time
from typing import Any

from stppo_jax.sampling import slot_calls
from stppo_jax.sampling import slot_driver

# A host that waits has rows whose observations are not there yet; a host that
# is done has no rows.
_WAITS, _DONE = 'waits', 'done'
_ORDER = ('extend', 'copy', 'decode', _WAITS, _DONE)
# If all hosts wait, the seconds until they tell each other their calls again.
_PAUSE = 0.005

# Yields the values of all hosts, see `voting.agreed`.
Agreed = Callable[[Any], contextlib.AbstractContextManager[list[Any]]]


class SliceDriver(slot_driver.SlotDriver):
  """Calls programs in step with the other hosts.

  Args:
    programs, options: see `SlotDriver`.
    agreed: yields the values of all hosts.
  """

  joins = True

  def __init__(self, programs, options, *, agreed: Agreed):
    super().__init__(programs, options)
    self._agreed = agreed

  def join(self, *, done: bool) -> bool:
    """See `SlotDriver.join`."""
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
    # A host may take part in many programs of others before its own program is
    # the first of `_ORDER`. It does not wait for ever: each of them brings its
    # host forward, until that host needs a later program, too, or waits.
    while True:
      with self._agreed(call) as calls:
        merged = _merged(calls)
        if merged.program == call.program:
          return function(merged)
        self._call_for_others(merged)

  def _num_pages(self, slots, appended=0) -> int:
    # If all slots are computed together, the result must not depend on when
    # other hosts need more pages, which would choose another program.
    if self.compacts or self._programs.takes_any_number:
      return super()._num_pages(slots, appended)
    return self._programs.pages_per_row

  def _call_for_others(self, call: slot_calls.Call) -> None:
    """Calls a program for no slot of this host."""
    weights = self._programs.weights
    assert weights is not None
    if call.program == 'extend':
      self._extend({}, 0, weights.params, call)
    elif call.program == 'copy':
      self._copy({}, call)
    elif call.program == 'decode':
      self._decode({}, weights.params, call)


def _merged(calls: Sequence[Sequence[Any]]) -> slot_calls.Call:
  """Returns the call that all hosts make, from the calls that they need."""
  program = min((call[0] for call in calls), key=_ORDER.index)
  needed = [slot_calls.Call(*call) for call in calls if call[0] == program]
  return slot_calls.Call(
    program,
    max(call.size for call in needed),
    max(call.num_pages for call in needed),
    # The program counts the turns of all hosts.
    sum(call.enough for call in needed),
    any(call.greedy for call in needed),
  )
