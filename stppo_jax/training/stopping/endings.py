"""Ends a run so that its last finished step is not lost, whatever has happened.

A step can be saved until an update consumes its state. So a run that ends while
it collects, evaluates or writes saves the step before; one that ends in an
update goes on from its newest checkpoint.
"""

from collections.abc import Iterator
import contextlib
import functools
from typing import Protocol

from stppo_jax import exits
from stppo_jax import interruption
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.training import saving
from stppo_jax.workdir import lock

_RESUMES = 'the same command resumes'


class Stopped(Exception):
  """A file or a connection has failed; the run can be resumed."""

  exit_code = exits.TRY_AGAIN


class Endable(Protocol):
  """The part of a run that its end needs; see `run.Run`."""

  hosts: hosts_lib.Hosts
  resumed: bool
  exit_code: int
  unit: str
  steps_done: int

  @property
  def last(self) -> str:
    """The last finished step, such as 'step 3'."""
    ...

  @property
  def has_unsaved(self) -> bool:
    """Whether a finished step would be lost."""
    ...

  @property
  def is_intact(self) -> bool:
    """Whether no update has consumed the state of the last finished step."""
    ...

  def save(self) -> None:
    """Saves the last finished step, and waits."""

  def show(self, text: str) -> None:
    """Prints text."""

  def release(self, exit_code: int) -> None:
    """Leaves the folder as an ended process does."""


@contextlib.contextmanager
def handled(
  run: Endable, interrupt: interruption.Interruption
) -> Iterator[None]:
  """Saves a run whose body a signal or an error has ended.

  Raises:
    Stopped: in place of an OSError of a run that has begun.
  """
  interrupt.rescue = functools.partial(_rescue, run, interrupt)
  try:
    yield
  except interruption.Interrupted:
    interrupt.rescue = interruption.no_rescue
    assert interrupt.exit_code is not None  # a signal was received
    run.exit_code = interrupt.exit_code
    _save_interrupted(run)
  except Exception as error:
    interrupt.rescue = interruption.no_rescue
    _save_last(run, error)
    is_lost_output = isinstance(error, BrokenPipeError)
    if not run.resumed or not isinstance(error, OSError) or is_lost_output:
      raise
    if hasattr(error, 'exit_code'):
      raise
    # If a rename has failed, the second name is its target.
    name = error.filename2 or error.filename
    cause = f'{name}: {error.strerror}' if name else str(error)
    raise Stopped(f'{cause}; {_progress(run)}; {_RESUMES}') from error
  finally:
    interrupt.rescue = interruption.no_rescue


def _save_interrupted(run: Endable) -> None:
  """Saves a run that a signal has ended, and says what the next start does."""
  if not run.resumed:
    # Whatever a start has written is complete, or the next start makes it
    # again.
    print(
      f'interrupted before the first {run.unit}; the same command starts again'
    )
    return
  if run.steps_done == 0:
    # There is nothing to lose, and the first save compiles a program.
    run.show(
      f'interrupted before the first {run.unit}; the same command starts again'
    )
    return
  try:
    run.save()
  except saving.NoTime as error:
    run.show(f'interrupted after {run.last}, {error}; {_RESUMES}')
  else:
    run.show(f'interrupted after {run.last}, saved; {_RESUMES}')


def _save_last(run: Endable, error: Exception) -> None:
  """Saves a run that an error has ended, if there is something to save."""
  saves = getattr(error, 'saves', None)
  if saves is not None:
    # The others save too, unless a host was lost in the middle of a step.
    if run.resumed and saves:
      try:
        run.save()
      except saving.NoTime as second:
        run.show(f'{run.last} is {second}')
    return
  if isinstance(error, lock.Lost):
    return
  # Of several hosts, the others are not in a state in which they could save.
  if run.hosts.count > 1 or not run.has_unsaved or not run.is_intact:
    return
  try:
    run.save()
  except Exception as second:
    run.show(f'{run.last} could not be saved and is lost: {second}')
  else:
    run.show(f'{run.last} is saved')


def _progress(run: Endable) -> str:
  if run.has_unsaved:
    return f'{run.last} was not saved'
  return f'{run.last} is saved'


def _rescue(
  run: Endable,
  interrupt: interruption.Interruption,
  exit_code: int,
  *,
  answered: bool,
) -> bool:
  """Prepares the end of a process whose main thread does not react.

  It may be compiling, which nothing can interrupt. This is another thread.

  Args:
    run: the run.
    interrupt: knows how long ago the signal was.
    exit_code: the exit code of the signal.
    answered: whether the main thread knows of the signal: then it goes on to an
      end, and its state may be consumed meanwhile.

  Returns:
    Whether the process may end now.
  """
  if run.hosts.count > 1:
    return False
  if run.has_unsaved:
    if not run.is_intact and interrupt.is_overdue:
      run.show(
        f'interrupted in the updates after {run.last}, which do not end '
        f'within preemption.grace={interrupt.grace:g} s: what was done since '
        f'the newest checkpoint is lost; {_RESUMES}'
      )
      run.release(exit_code)
      return True
    if answered or not run.is_intact:
      return False
    try:
      run.save()
    except Exception as error:  # the main thread tries again
      run.show(f'{run.last} cannot be saved now: {error}')
      return False
  if run.resumed and run.steps_done:
    run.show(f'interrupted after {run.last}, saved; {_RESUMES}')
  else:
    print(
      f'interrupted before the first {run.unit}; the same command starts again',
      flush=True,
    )
  run.release(exit_code)
  return True
