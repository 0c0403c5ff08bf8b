"""Saves the states of a run as checkpoints.

A line is logged if the disk has no room for the next checkpoint. Threads write
a checkpoint while the loop goes on. If writing fails, the error is raised when
the next step is finished, and earlier checkpoints are intact.
"""

import dataclasses
import json
import logging
import shutil
import time
from typing import Any

import jax

from stppo_jax import buckets
from stppo_jax import exits
from stppo_jax.learner import state as state_lib
from stppo_jax.records import writer as writer_lib
from stppo_jax.records.checkpoints import checkpoint
from stppo_jax.records.checkpoints import pending_save
from stppo_jax.records.checkpoints import saved_steps
from stppo_jax.training import checkpoint_state
from stppo_jax.training import claim as claim_lib

State = state_lib.TrainState
_log = logging.getLogger(__name__)


class NoRoom(RuntimeError):
  """The disk has no room for a checkpoint; nothing was trained or lost."""

  exit_code = exits.TRY_AGAIN


class NoTime(Exception):
  """No save was begun, because the process may be killed during the save."""

  exit_code = exits.TRY_AGAIN


@dataclasses.dataclass
class Extra:
  """The part of a checkpoint that is not the state.

  Attributes:
    unwritten: the metrics and dialogues of a step whose evaluation or writing
      was interrupted; None once the step is written.
    score: the evaluation score of the step; None if it was not evaluated.
    line: the line of the step in metrics.jsonl; '' before it is written.
  """

  unwritten: tuple[dict, list] | None = None
  score: float | None = None
  line: str = ''

  def record(self) -> dict[str, Any]:
    """Returns this part of the checkpoint as a dict that JSON can write."""
    record = {'score': self.score, 'line': self.line or None}
    if self.unwritten is not None:
      # The values are kept as text, because a metric may be nan, which a
      # manifest must not contain.
      record['unwritten'] = json.dumps(self.unwritten)
    return {name: x for name, x in record.items() if x is not None}

  @classmethod
  def of_record(cls, record: dict[str, Any]) -> 'Extra':
    """Restores the object from a result of `record`, which may lack fields."""
    unwritten = record.get('unwritten')
    return cls(
      None if unwritten is None else tuple(json.loads(unwritten)),
      record.get('score'),
      record.get('line', ''),
    )


class Saver:
  """Saves and restores the states of one run.

  Args:
    config: the config of the run.
    folder: the run's folder. All of its hosts call the methods that save and
      restore.
    checkpoints: converts between states and checkpoints.
    start: the state before the first step.

  Attributes:
    checkpointer: reads and writes the checkpoints.
  """

  def __init__(
    self,
    config,
    folder: claim_lib.Folder,
    checkpoints: checkpoint_state.Checkpoints,
    start: State,
  ):
    self._workdir, self._hosts = folder.path, folder.hosts
    self._lock, self._bucket = folder.lock, folder.bucket
    self._grace = config.preemption.grace
    options = config.checkpoint
    self.checkpointer = checkpoint.Checkpointer(
      folder.path,
      keep=options.keep,
      keep_every=options.keep_every,
      flush=folder.flush,
      check=folder.check_held,
      retry=options.retry,
    )
    self._checkpoints, self._start = checkpoints, start
    # Frozen weights are not saved.
    arrays = start.with_frozen({})
    # The size of a checkpoint in bytes.
    self._size = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
    self._told_of_room = False
    self._restored = 0

  @property
  def saved(self) -> int:
    """The newest step that is on disk; 0 if there is none."""
    return max(self._restored, self.checkpointer.pending.saved)

  def restore(self, unit: str) -> 'LastStep':
    """Returns the last step, from the newest valid checkpoint or the start.

    Args:
      unit: the noun for an iteration in printed lines: 'step' or 'update'.

    Raises:
      Exceptions of `Checkpointer.restore_latest`.
    """
    restored = self._checkpoints.restore(self.checkpointer, self._start)
    if restored is None:
      return LastStep(self, unit, 0, self._start, Extra())
    self._restored, state, record = restored
    extra = Extra.of_record(record)
    if extra.unwritten is not None and not self._hosts.is_first:
      # The checkpoint contains only the dialogues that the first host writes.
      extra.unwritten = extra.unwritten[0], []
    return LastStep(self, unit, self._restored, state, extra)

  def check(self) -> None:
    """Checks that no save has failed, and that this process holds the folder.

    Raises:
      SaveFailed: the last save has failed. If threads still write the last
        save, this method does not wait for them.
      Lost: another process has taken the folder.
    """
    self.checkpointer.check()
    if self._lock is not None:
      self._lock.check()

  def save(self, step: int, state: State, extra: Extra, *, waits: bool) -> None:
    """Saves a step if it is not saved yet; see `Checkpointer.save`."""
    if self._bucket is not None:
      try:
        self._bucket.wait()
      except buckets.BucketError:
        # The previous save waits for the bucket too, and closing the
        # checkpointer would wait for that save. This tells `close` not to wait.
        self.checkpointer.pending.cannot_end = True
        raise
    if self._lock is not None:
      self._lock.check()
    try:
      self.checkpointer.wait()
    except pending_save.SaveFailed as error:
      # Other hosts still wait for this host's part of the failed checkpoint.
      if self._hosts.count > 1:
        raise
      # The error is not raised, because the step that is saved now replaces the
      # step whose save has failed.
      _log.warning('%s', error)
    arrays, record = self._checkpoints.content(step, state)
    self.checkpointer.save(step, arrays, record | extra.record(), waits=waits)

  def save_in_time(self, last: 'LastStep', since: float | None) -> None:
    """Saves the last step at the end of a run, if there is time for that.

    The call returns when the step is on disk.

    Args:
      last: the last finished step.
      since: the time of the signal that ends the run; None without a signal.

    Raises:
      NoTime: there is too little time, so no host has saved the step.
    """
    line = self._lack_of_time(last.done, since)
    # Either all hosts save or none: a host that saves alone would wait for the
    # parts of the other hosts.
    lines = self._hosts.exchange('time to save', line)
    if any(lines):
      raise NoTime(next(filter(None, lines)))
    self.save(last.done, last.state, last.extra, waits=True)

  def check_room(self) -> None:
    """Raises `NoRoom` if the disk has no room for a checkpoint."""
    line = self._lack_of_room()
    if line:
      raise NoRoom(line)

  def warn_of_room(self) -> None:
    """Logs a line if the next checkpoint would not fit on the disk.

    After such a line, calls log nothing until the disk has had room again.
    """
    if self.checkpointer.pending.step or not self._hosts.is_first:
      return
    line = self._lack_of_room()
    if line and not self._told_of_room:
      _log.info('warning: %s; without room, the next save ends the run', line)
    # If the disk has room in between, a later lack of room is logged again.
    self._told_of_room = bool(line)

  def _lack_of_room(self) -> str:
    """Returns a line if the disk has no room for a checkpoint; otherwise ''."""
    # A bucket does not fill up, and the arrays of a run in a bucket are not
    # written to the disk of this machine.
    if self._bucket is not None:
      return ''
    free = shutil.disk_usage(self._workdir).free
    if free >= self._size:
      return ''
    size, free = map(saved_steps.describe_size, (self._size, free))
    return (
      f'{self._workdir}: a checkpoint takes about {size}, and {free} are free'
    )

  def _lack_of_time(self, step: int, since: float | None) -> str:
    """Returns a line if there is no time to save a step; otherwise ''."""
    # If a save of this step has begun, the end of the run waits for it anyway.
    pending = self.checkpointer.pending
    has_begun = step in (self.saved, pending.step)
    if not self._grace or since is None or has_begun:
      return ''
    takes = pending.seconds
    left = self._grace - (time.monotonic() - since) - pending.seconds_left
    if takes <= left:
      return ''
    return (
      f'not saved: the last save took {takes:.1f} s, and {max(left, 0):.1f} s '
      f'are left of preemption.grace={self._grace:g}'
    )


@dataclasses.dataclass
class LastStep:
  """The last finished step of a run, which the end of the run must not lose.

  `str` returns the step's name, such as 'step 3'.

  Attributes:
    saver: saves the step.
    unit: the noun for an iteration in printed lines: 'step' or 'update'.
    done: the number of steps that are done.
    state: the state after the step.
    extra: the part of the step's checkpoint that is not the state.
    is_consumed: whether an update may have donated the state. If so, the state
      cannot be saved.
  """

  saver: Saver
  unit: str
  done: int
  state: State
  extra: Extra
  is_consumed: bool = False

  def __str__(self) -> str:
    return f'{self.unit} {self.done}'

  def finish(self, done: int, state: State, extra: Extra) -> None:
    """Replaces the last finished step by a newer step."""
    self.done, self.state, self.extra = done, state, extra
    self.is_consumed = False

  @property
  def is_unsaved(self) -> bool:
    """Whether the step is not on disk yet."""
    return self.done > self.saver.saved


def rewind(writer: writer_lib.Writer, last: LastStep) -> None:
  """Moves aside metrics and dialogues of steps after the newest checkpoint.

  Args:
    writer: writes the files of metrics and dialogues.
    last: the step that was restored.
  """
  # The restored step's line in metrics.jsonl is kept, unless this start writes
  # the line: for step 0, and for a step whose evaluation was interrupted before
  # its line was written.
  step, extra = last.done, last.extra
  written = step > 0 and extra.unwritten is None
  aside = writer.rewind(step - (not written), saved=step)
  if aside is not None:
    _log.info(
      'going on after %s; metrics and dialogues of later steps are now in %s',
      last,
      aside,
    )
  if written and writer.complete(step, extra.line):
    _log.info(
      'the line of %s was missing in metrics.jsonl and is written again', last
    )
