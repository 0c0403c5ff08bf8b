"""Tracks the one save that threads write while the run goes on.

Orbax raises the error of a failed save only when a caller waits for the save.
After an error, Orbax's list of steps must be read again, because the list may
contain the step that failed.

If several hosts save, each host writes a part of the checkpoint. If the part of
a host fails, Orbax logs the error at once. But on this host Orbax waits for the
parts of all other hosts, for up to twenty minutes, before it raises the error.
After such an error the run must end on all hosts together, because the other
hosts would go on waiting for this host.
"""

from collections.abc import Iterator
import contextlib
import time

import orbax.checkpoint as ocp

from stppo_jax import exits
from stppo_jax.records.checkpoints import orbax_errors

_POLL = 0.05  # seconds between two looks at a save that is being written


class SaveFailed(RuntimeError):
  """A step could not be saved; earlier steps are unchanged."""

  exit_code = exits.TRY_AGAIN


class PendingSave:
  """Begins a save, and finds out whether it succeeds or fails.

  Args:
    num_hosts: the number of hosts that save together.

  Attributes:
    seconds: the seconds that the last completed save took; 0 before the first
      save.
    saved: the step of the last completed save; 0 before the first save.
    cannot_end: True if this host's part has failed while Orbax waits for the
      parts of other hosts, or if the bucket is out of reach. A call that waits
      for the save, or that closes Orbax's manager, would then be blocked.
  """

  def __init__(self, num_hosts: int = 1):
    self._num_hosts = num_hosts
    self.seconds, self.saved = 0.0, 0
    self.cannot_end = False
    self._manager: ocp.CheckpointManager | None = None
    self._step = 0
    self._is_beginning = self._is_stale = False
    self._began = self._ended = 0.0

  def begin(
    self, manager: ocp.CheckpointManager, step: int, items: ocp.args.Composite
  ) -> None:
    """Copies the state to the host, and starts threads that write the copy.

    Raises:
      SaveFailed: the save could not be begun.
    """
    assert self._manager is None  # the last save has been waited for
    # The list of steps may still contain a step whose save has failed.
    if self._is_stale:
      with self._failing(manager, step):
        manager.reload()
        self._is_stale = False
    self._began, self._ended = time.monotonic(), 0.0
    self._is_beginning = True
    orbax_errors.logged.clear()
    try:
      with self._failing(manager, step):
        manager.save(step, args=items, force=True)
      # `_manager` is set only when `manager.save` has returned. Before that, a
      # `wait` on another thread would find nothing to wait for in the manager,
      # and would take the step for saved.
      self._manager, self._step = manager, step
    finally:
      self._is_beginning = False

  @property
  def step(self) -> int:
    """The step of the save that is going on, or 0 if no save is going on.

    A save goes on until `check` or `wait` has reported its end.
    """
    return 0 if self._manager is None else self._step

  @property
  def seconds_left(self) -> float:
    """The seconds until the save ends, if it takes as long as the last save."""
    if self._manager is None or self._ended:
      return 0.0
    return max(self.seconds - (time.monotonic() - self._began), 0.0)

  def check(self) -> bool:
    """Returns whether a save has ended since the last `check` or `wait`.

    Raises:
      SaveFailed: the save has failed. Nothing is left of its step.
    """
    if self._manager is None:
      return False
    if self._manager.is_saving_in_progress():
      with self._failing(self._manager, self._step):
        self._check_part(self._manager)
      return False
    return self.wait()

  def wait(self) -> bool:
    """Waits until the save is on disk; returns False if there is no save.

    Raises:
      SaveFailed: the save has failed, and nothing is left of its step. Also
        raised if another thread is beginning a save, because nothing can wait
        for the end of that save yet.
    """
    if self._is_beginning:
      raise SaveFailed('another thread is beginning a save')
    if self._manager is None:
      return False
    with self._failing(self._manager, self._step):
      while self._check_part(self._manager):
        time.sleep(_POLL)
      self._manager.wait_until_finished()
    # This wait may begin long after the files were written, so the time that
    # `note_end` has noted counts.
    self.seconds = (self._ended or time.monotonic()) - self._began
    self._manager, self.saved = None, self._step
    return True

  def note_end(self) -> None:
    """Notes the time when all files are written; Orbax's thread calls this."""
    self._ended = time.monotonic()

  def _check_part(self, manager: ocp.CheckpointManager) -> bool:
    """Returns whether a save of several hosts is still being written.

    Raises:
      The error that Orbax has logged, if this host's part of the save failed.
    """
    if self._num_hosts == 1 or not manager.is_saving_in_progress():
      return False
    if orbax_errors.logged:
      self.cannot_end = True
      raise orbax_errors.logged[0]
    return True

  def _reload(self, manager: ocp.CheckpointManager) -> None:
    """Makes Orbax read its list of steps again.

    If the list cannot be read now, it is read again before the next save.
    """
    self._is_stale = True
    # An error here is ignored, because the error that is being handled says
    # more than another error of the bucket.
    with contextlib.suppress(Exception):
      manager.reload()
      self._is_stale = False

  @contextlib.contextmanager
  def _failing(
    self, manager: ocp.CheckpointManager, step: int
  ) -> Iterator[None]:
    """Turns every error of the `with` block into `SaveFailed`.

    So the caller handles all errors of a save, such as a full disk, alike.
    """
    try:
      yield
    except Exception as error:
      self._manager = None
      self._reload(manager)
      raise SaveFailed(
        f'step {step} could not be saved in {manager.directory}: '
        + orbax_errors.cause(error)
      ) from error
