"""Runs sections that all hosts end together.

A section has no program in it that waits for another host: it prepares,
collects or evaluates. At its end the hosts vote: each tells whether it is done,
was interrupted, or has failed. So every host knows before the next compiled
program whether all of them will come to it, and all save the same step.

The host that is interrupted or fails asks the others to abandon the section.
"""

from collections.abc import Callable, Iterator
import contextlib
from typing import Any

import jax

from stppo_jax import exits
from stppo_jax import interruption
from stppo_jax.parallel import coordinator
from stppo_jax.parallel import hosts as hosts_lib

# How many seconds a host that was interrupted or has failed waits for the votes
# of the others.
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
    interrupt: notices the signals of this one.
    patience: how many seconds a host that was interrupted or has failed waits
      for the others to vote; None: as long as it waits for hosts elsewhere.

  Raises:
    Interrupted: on all hosts, after a signal of any.
    HostFailed: on the others, after an error of one.
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
  # A host that has failed votes like the others: they would wait for it, and
  # only the votes tell them why they were stopped.
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
  # Its own error has a stack trace, so it goes before those of others.
  if error is not None and 'failed' in vote:
    raise error
  for index, other in enumerate(votes):
    if 'failed' in other:
      line = f'{hosts.describe(index)} failed: {other["failed"]}'
      raise hosts_lib.HostFailed(line, other['code'], saves=other['saves'])
  # The host that got the signal knows the exit code; those that were only asked
  # to stop have none.
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
  """Runs a section whose programs need all hosts.

  If one of several hosts left the section at a signal, the others would wait
  for it in vain. So all of them finish the section, and then leave together if
  one got a signal. A host without others leaves at once.

  Args:
    hosts: the hosts of the run.
    interruptible: returns a section that ends with a vote, see `voted`. This
      one may have such sections as parts.
  """
  if hosts.is_alone:
    with interruptible():
      yield
    return
  yield
  # The first host that comes here waits as long as the others still compute.
  with interruptible(patience=None):
    pass


@contextlib.contextmanager
def agreed(
  hosts: hosts_lib.Hosts, interrupt: interruption.Interruption, value: Any
) -> Iterator[list[Any]]:
  """Yields the values of all hosts, which decide what they call in the body.

  A program that one host called and another did not would keep the devices busy
  for ever. So a signal does not end the body, and ends the exchange on all
  hosts or on none.

  Args:
    hosts: the hosts of the run.
    interrupt: notices the signals of this one.
    value: the value of this host.

  Raises:
    Interrupted: before the body or after it.
  """
  with interrupt.postponed():
    yield hosts.exchange(coordinator.PROGRAM, value)


def _vote(
  error: BaseException | None,
  interrupt: interruption.Interruption,
) -> dict[str, Any]:
  """Returns the vote of this host; {} if it has done its section.

  A host that abandoned it because of another one has no exit code of its own.
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
