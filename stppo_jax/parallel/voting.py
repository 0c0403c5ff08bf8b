"""Runs sections of Python code that all hosts end together.

A section prepares, collects or evaluates. No compiled program in a section
waits for another host, except in a `collective_section`. At the end of a
section the hosts vote: each host tells whether it is done, was interrupted, or
has failed. So before the next compiled program, every host knows whether all
hosts will call the program, and all hosts save the same step.

A host that is interrupted or fails asks the other hosts to abandon the section.
"""

from collections.abc import Callable, Iterator
import contextlib
from typing import Any

import jax

from stppo_jax import exits
from stppo_jax import interruption
from stppo_jax.parallel import coordinator
from stppo_jax.parallel import hosts as hosts_lib

# Seconds for which a host that was interrupted or has failed waits for the
# votes of the other hosts.
PATIENCE = 20.0


@contextlib.contextmanager
def voted(
  hosts: hosts_lib.Hosts,
  interrupt: interruption.Interruption,
  *,
  patience: float | None = PATIENCE,
) -> Iterator[None]:
  """Runs a section that a signal on any host may cut short.

  Args:
    hosts: the hosts of the run.
    interrupt: the object that notices the signals of this host.
    patience: seconds for which a host that was interrupted or has failed waits
      for the votes of other hosts; None: as long as for other exchanges.

  Raises:
    Interrupted: raised on all hosts if one of them got a signal.
    HostFailed: raised on all other hosts if one host had an error. Also raised
      on a host that was interrupted or has failed, if the other hosts do not
      vote within `patience`.
  """
  if hosts.is_alone:
    with interrupt.interruptible():
      yield
    return
  error: BaseException | None = None
  try:
    with interrupt.interruptible():
      yield
  except hosts_lib.HostFailed:
    raise
  except jax.errors.JaxRuntimeError as caught:
    error = hosts.diagnose(caught)
    if error is not caught:
      raise error from caught
  except (Exception, interruption.Interrupted) as caught:
    error = caught
  # A host that has failed votes too, because the other hosts wait for its vote,
  # and only the votes tell them why they were stopped.
  vote = _vote(error, interrupt)
  if vote:
    hosts.stop()
  try:
    votes = hosts.exchange('vote', vote, timeout=patience if vote else None)
  except TimeoutError:
    cause = vote.get('failed', 'interrupted')
    raise hosts_lib.HostFailed(
      f'{hosts.describe(hosts.index)}: {cause}; other hosts did not abandon '
      f'their work within {patience:.0f} s',
      vote.get('code', interrupt.exit_code or exits.TRY_AGAIN),
    ) from error
  # If several hosts have failed, this host raises its own error, because only
  # that error has a stack trace here.
  if error is not None and 'failed' in vote:
    raise error
  for index, other in enumerate(votes):
    if 'failed' in other:
      line = f'{hosts.describe(index)} failed: {other["failed"]}'
      raise hosts_lib.HostFailed(line, other['code'], saves=other['saves'])
  # A host that got a signal knows its exit code. A host that was only asked to
  # stop has voted with the exit code None.
  codes = [other['interrupted'] for other in votes if other]
  if codes:
    interrupt.exit_code = next(
      (code for code in codes if code), exits.TRY_AGAIN
    )
    raise interruption.Interrupted(interrupt.exit_code)


@contextlib.contextmanager
def collective_section(
  hosts: hosts_lib.Hosts,
  interruptible: Callable[..., contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
  """Runs a section whose compiled programs need all hosts.

  If one host left the section at a signal, the other hosts would wait for it
  for ever. So all hosts finish the section, and then end together if one of
  them got a signal. If a run has only one host, a signal ends the section at
  once.

  Args:
    hosts: the hosts of the run.
    interruptible: a function that returns a section with a vote at its end, see
      `voted`. The body of the collective section may contain such sections.
  """
  if hosts.is_alone:
    with interruptible():
      yield
    return
  yield
  # `PATIENCE` would be too short: even after a signal, a host that votes early
  # must wait until the other hosts have finished the section.
  with interruptible(patience=None):
    pass


@contextlib.contextmanager
def agreed(
  hosts: hosts_lib.Hosts, interrupt: interruption.Interruption, value: Any
) -> Iterator[list[Any]]:
  """Yields the values of all hosts, by which the body decides what to call.

  If one host called a compiled program and another host did not, the program
  would keep the devices busy for ever. So a signal does not end the body. And a
  signal ends the exchange of values either on all hosts or on no host.

  Args:
    hosts: the hosts of the run.
    interrupt: the object that notices the signals of this host.
    value: the value of this host.

  Raises:
    Interrupted: raised before the body or after it, if there was a signal.
  """
  with interrupt.postponed():
    yield hosts.exchange(coordinator.PROGRAM, value)


def _vote(
  error: BaseException | None,
  interrupt: interruption.Interruption,
) -> dict[str, Any]:
  """Returns the vote of this host; {} if this host has finished its section.

  If this host abandoned its section only because another host asked for it, the
  exit code in the vote is None.
  """
  if error is None:
    return {}
  if isinstance(error, interruption.Interrupted):
    return {'interrupted': interrupt.exit_code}
  return {
    'failed': hosts_lib.describe(error),
    'code': getattr(error, 'exit_code', exits.BUG),
    'saves': getattr(error, 'saves', False),
  }
