"""Ends a run so that its last finished step is not lost, whatever has happened.

A step can be saved until an update consumes its state. So a run that ends while
it collects, evaluates or writes saves the step before; one that ends in an
update goes on from its newest checkpoint.
"""

from collections.abc import Iterator
import contextlib
import functools
import logging

from stppo_jax import buckets
from stppo_jax import exits
from stppo_jax import interruption
from stppo_jax.training import claim
from stppo_jax.training import saving
from stppo_jax.workdir import lock

_RESUMES = 'the same command resumes'
_log = logging.getLogger(__name__)


class Stopped(Exception):
  """A file or a connection has failed; the run can be resumed."""

  exit_code = exits.TRY_AGAIN


@contextlib.contextmanager
def handled(last: saving.LastStep, folder: claim.Folder) -> Iterator[None]:
  """Saves the last step of a run whose body a signal or an error has ended.

  A signal ends the body without an error.

  Args:
    last: the last finished step.
    folder: the run's folder.

  Raises:
    Stopped: in place of an OSError.
  """
  interrupt = folder.interrupt
  interrupt.force_exit = functools.partial(_force_exit, last, folder)
  try:
    yield
  except interruption.Interrupted as signalled:
    folder.exit_code = signalled.exit_code
    interrupt.force_exit = interruption.no_force_exit
    interrupt.is_told = True
    _save_interrupted(last, folder)
  except Exception as error:
    interrupt.force_exit = interruption.no_force_exit
    _save_last(last, folder, error)
    # Such an error says by itself how the run ends: by its exit code, or
    # because nobody reads the output any more.
    is_known = hasattr(error, 'exit_code') or isinstance(error, BrokenPipeError)
    if is_known or not isinstance(error, OSError):
      raise
    # If a rename has failed, the second name is its target.
    name = error.filename2 or error.filename
    cause = f'{name}: {error.strerror}' if name else str(error)
    progress = f'{last} {"was not" if last.is_unsaved else "is"} saved'
    raise Stopped(f'{cause}; {progress}; {_RESUMES}') from error
  finally:
    interrupt.force_exit = interruption.no_force_exit


def _save_interrupted(last: saving.LastStep, folder: claim.Folder) -> None:
  """Saves a step after a signal, and says what the next start does."""
  try:
    # Before the first step there is nothing to lose, and the first save
    # compiles a program.
    if last.done:
      last.saver.save_in_time(last, folder.interrupt.signalled)
  except saving.NoTime as error:
    _log.info('interrupted after %s, %s; %s', last, error, _RESUMES)
  else:
    _tell_saved(last)


def _tell_saved(last: saving.LastStep) -> None:
  if last.done:
    _log.info('interrupted after %s, saved; %s', last, _RESUMES)
  else:
    claim.tell_before_first(last.unit)


def _save_last(
  last: saving.LastStep, folder: claim.Folder, error: Exception
) -> None:
  """Saves a step after an error, if there is something to save."""
  saves = getattr(error, 'saves', None)
  if saves is not None:
    # The others save too, unless a host was lost in the middle of a step.
    if saves:
      try:
        last.saver.save_in_time(last, folder.interrupt.signalled)
      except saving.NoTime as second:
        _log.info('%s is %s', last, second)
    return
  # Another process holds the folder, or the bucket was waited for in vain:
  # nothing can be saved.
  if isinstance(error, lock.Lost | buckets.BucketError):
    return
  # An error of one of several hosts finds the others anywhere in a step, where
  # they cannot save, and all must save together.
  alone = folder.hosts.is_alone
  if not alone or not last.is_unsaved or last.is_consumed:
    return
  try:
    last.saver.save_in_time(last, folder.interrupt.signalled)
  except Exception as second:
    # Only logged: the error that ended the run is the one to raise.
    _log.info('%s could not be saved and is lost: %s', last, second)
  else:
    _log.info('%s is saved', last)


def _force_exit(
  last: saving.LastStep,
  folder: claim.Folder,
  exit_code: int,
  *,
  answered: bool,
) -> bool:
  """Prepares the end of a process whose main thread does not react.

  It may be compiling, which nothing can interrupt. This is another thread.

  Args:
    last: the last finished step.
    folder: the run's folder.
    exit_code: the exit code of the signal.
    answered: whether the main thread knows of the signal: then it goes on to an
      end, and its state may be consumed meanwhile.

  Returns:
    Whether the process may end now.
  """
  interrupt = folder.interrupt
  if not folder.hosts.is_alone:
    return False
  if last.is_unsaved:
    if last.is_consumed and interrupt.is_overdue:
      _log.info(
        'interrupted in the updates after %s; these do not end within '
        'preemption.grace=%g s, so what was done since the newest checkpoint '
        'is lost; %s',
        last,
        interrupt.grace,
        _RESUMES,
      )
      folder.release(exit_code)
      return True
    if answered or last.is_consumed:
      return False
    try:
      last.saver.save_in_time(last, interrupt.signalled)
    except Exception as error:  # the main thread tries again
      _log.info('%s cannot be saved now: %s', last, error)
      return False
  _tell_saved(last)
  folder.release(exit_code)
  return True
