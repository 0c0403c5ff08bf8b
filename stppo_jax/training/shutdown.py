"""Saves the last finished step when a signal or an error ends a run.

The state of a step can be saved until an update donates it. So a run that ends
while it collects, evaluates or writes saves the last finished step. If a run
ends within an update, the next start goes on from the newest checkpoint.
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
  """Saves the last finished step when a signal or an error ends the body.

  After a signal, no error is raised.

  Args:
    last: the last finished step.
    folder: the run's folder.

  Raises:
    Stopped: in place of an OSError without an exit code, except for a broken
      pipe.
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
    # Some errors are raised unchanged: an exit code says by itself how the run
    # ends, and a broken pipe means that nobody reads the output any more.
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
  """Saves the last step after a signal, and logs what the next start does."""
  try:
    # Before the first step there is nothing to lose, and saving would take
    # longer, because the first save compiles a program.
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
  """Saves the last step after an error, if that is possible and needed."""
  saves = getattr(error, 'saves', None)
  if saves is not None:
    # If `saves` of an error is true, all hosts come to this point and save the
    # step together. It is false if a host was lost in the middle of a step.
    if saves:
      try:
        last.saver.save_in_time(last, folder.interrupt.signalled)
      except saving.NoTime as second:
        _log.info('%s is %s', last, second)
    return
  # Another process has taken the folder, or the bucket stayed out of reach, so
  # nothing can be saved.
  if isinstance(error, lock.Lost | buckets.BucketError):
    return
  # Several hosts can only save together. When one of them has an error, the
  # other hosts may be at any point of a step, so no host saves.
  alone = folder.hosts.is_alone
  if not alone or not last.is_unsaved or last.is_consumed:
    return
  try:
    last.saver.save_in_time(last, folder.interrupt.signalled)
  except Exception as second:
    # This error is only logged, because the error that ended the run is raised.
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
  """Prepares the end of a process whose main thread does not end in time.

  The main thread may be compiling, for example, which nothing can interrupt.
  Another thread calls this function. The process may end once the last step is
  saved. This function saves the step, unless the main thread has donated the
  state to updates, or may donate it now. If the system is about to kill a
  process whose state has been donated, the process may end without a save. In a
  run of several hosts, no process ends here.

  Args:
    last: the last finished step.
    folder: the run's folder.
    exit_code: the exit code of the signal.
    answered: whether the main thread knows of the signal. If so, the main
      thread is ending the run, and may donate the state at any moment.

  Returns:
    Whether the process may end now. The folder is then released.
  """
  interrupt = folder.interrupt
  if not folder.hosts.is_alone:
    return False
  if last.is_unsaved:
    if last.is_consumed and interrupt.is_overdue:
      _log.info(
        'interrupted in the updates after %s; the updates do not end within '
        'preemption.grace=%g s, so all progress since the newest checkpoint '
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
    except Exception as error:  # the main thread tries to save again
      _log.info('%s cannot be saved now: %s', last, error)
      return False
  _tell_saved(last)
  folder.release(exit_code)
  return True
