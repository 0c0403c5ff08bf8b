"""The save that threads write while its caller goes on; at most one.

Orbax tells of an error only to whoever waits for the save. After one, its list
of steps must be read again: it may name the step that failed.

Of several hosts, each waits in Orbax for the parts of all others, for twenty
minutes, before it would tell of an error of its own. But it logs the error at
once. After one the run must end, which it does on all hosts together: the
others would go on to wait for this one.
"""

from collections.abc import Iterator
import contextlib
import time

import orbax.checkpoint as ocp

from stppo_jax import exits
from stppo_jax.records.checkpoints import orbax_errors

_POLL = 0.05  # seconds


class SaveFailed(RuntimeError):
  """A step could not be saved; earlier steps are unchanged."""

  exit_code = exits.TRY_AGAIN


class PendingSave:
  """Begins saves, and finds out how they end.

  Args:
    num_hosts: the number of hosts that save together.

  Attributes:
    seconds: how long the last save took until it was on disk; 0 before one.
    saved: the step of that save; 0 before one.
    cannot_end: whether a save has failed for which other hosts still wait in
      Orbax, or goes on without hope: whoever closes it would wait, too.
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
    """Copies what is saved to the host, and has threads write it.

    Raises:
      SaveFailed: it could not be begun.
    """
    assert self._manager is None  # the last one was waited for
    # The list of steps may name the one that has failed.
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
      # Not earlier: a wait on another thread would find nothing to wait for,
      # and take the step for saved.
      self._manager, self._step = manager, step
    finally:
      self._is_beginning = False

  @property
  def step(self) -> int:
    """The step of the save that is going on; 0 if there is none.

    A save goes on until `check` or `wait` has told how it ended.
    """
    return 0 if self._manager is None else self._step

  @property
  def seconds_left(self) -> float:
    """How long the save goes on if it takes as long as the one before."""
    if self._manager is None or self._ended:
      return 0.0
    return max(self.seconds - (time.monotonic() - self._began), 0.0)

  def check(self) -> bool:
    """Returns whether a save has ended since the last call of this or `wait`.

    Raises:
      SaveFailed: nothing is left of its step.
    """
    if self._manager is None:
      return False
    if self._manager.is_saving_in_progress():
      with self._failing(self._manager, self._step):
        self._check_part(self._manager)
      return False
    return self.wait()

  def wait(self) -> bool:
    """Waits until the save is on disk; returns False if there was none.

    Raises:
      SaveFailed: nothing is left of its step, or another thread is beginning a
        save, whose end cannot be waited for yet.
    """
    if self._is_beginning:
      raise SaveFailed('another thread is beginning a save')
    if self._manager is None:
      return False
    with self._failing(self._manager, self._step):
      while self._check_part(self._manager):
        time.sleep(_POLL)
      self._manager.wait_until_finished()
    # The wait may begin long after the files were written.
    self.seconds = (self._ended or time.monotonic()) - self._began
    self._manager, self.saved = None, self._step
    return True

  def note_end(self) -> None:
    """Notes that the files are written; Orbax calls it on a thread."""
    self._ended = time.monotonic()

  def _check_part(self, manager: ocp.CheckpointManager) -> bool:
    """Returns whether the parts of several hosts are being written.

    Raises:
      The error of the part of this host.
    """
    if self._num_hosts == 1 or not manager.is_saving_in_progress():
      return False
    if orbax_errors.logged:
      self.cannot_end = True
      raise orbax_errors.logged[0]
    return True

  def _reload(self, manager: ocp.CheckpointManager) -> None:
    """Reads the list of steps again; in a bucket out of reach, later."""
    self._is_stale = True
    # The error that is being handled says more than another one of the bucket.
    with contextlib.suppress(Exception):
      manager.reload()
      self._is_stale = False

  @contextlib.contextmanager
  def _failing(
    self, manager: ocp.CheckpointManager, step: int
  ) -> Iterator[None]:
    """Raises `SaveFailed` for an error of the body.

    Every error of a save, such as a full disk, is the same to the caller.
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
