"""Saves the states of a run, and says when there is no room for the next one.

A save is written by threads while the loop goes on. If it fails, the step after
it says so, and the checkpoints before it are intact.
"""

from collections.abc import Callable
import dataclasses
import json
import logging
import pathlib
import shutil
import time
from typing import Any

import jax

from stppo_jax import exits
from stppo_jax.learner import state as state_lib
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.records import writer as writer_lib
from stppo_jax.records.checkpoints import checkpoint
from stppo_jax.records.checkpoints import pending_save
from stppo_jax.records.checkpoints import saved_steps
from stppo_jax.training import checkpoint_state
from stppo_jax.workdir import lock

State = state_lib.TrainState
_log = logging.getLogger(__name__)


class NoRoom(RuntimeError):
  """The disk has no room for a checkpoint; nothing was trained or lost."""

  exit_code = exits.TRY_AGAIN


class NoTime(Exception):
  """A save was not begun, since the process may be killed before its end."""

  exit_code = exits.TRY_AGAIN


@dataclasses.dataclass
class Extra:
  """The part of a checkpoint that is not the state.

  Attributes:
    unwritten: metrics and dialogues of a step that still has to be evaluated.
    score: the score of the step; None if it was not evaluated.
    line: the line of the step in the file of metrics; '' before it is written.
  """

  unwritten: tuple[dict, list] | None = None
  score: float | None = None
  line: str = ''

  def record(self) -> dict[str, Any]:
    """Returns what JSON can write."""
    record = {}
    if self.unwritten is not None:
      # As text, because a metric may be nan, which a manifest must not contain.
      record['unwritten'] = json.dumps(self.unwritten)
    if self.score is not None:
      record['score'] = self.score
    if self.line:
      record['line'] = self.line
    return record

  @classmethod
  def of_record(cls, record: dict[str, Any]) -> 'Extra':
    """Returns what `record` made JSON of; older checkpoints have less."""
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
    workdir: its folder.
    hosts: its hosts, all of which call the methods that save or restore.
    claim: the lock of the folder; None if another host holds it.

  Attributes:
    checkpointer: has the checkpoints.
  """

  def __init__(
    self,
    config,
    workdir: pathlib.Path,
    hosts: hosts_lib.Hosts,
    claim: lock.Claim | None,
  ):
    self._workdir, self._hosts, self._claim = workdir, hosts, claim
    self._grace = config.preemption.grace
    options = config.checkpoint
    self.checkpointer = checkpoint.Checkpointer(
      workdir, keep=options.keep, keep_every=options.keep_every
    )
    self._checkpoints: checkpoint_state.Checkpoints | None = None
    self._size = 0  # bytes of a checkpoint
    self._told_of_room = False
    self._restored = 0

  @property
  def saved(self) -> int:
    """The newest step that is on disk; 0 also if there is none."""
    return max(self._restored, self.checkpointer.saved)

  def restore(
    self, start: State, checkpoints: checkpoint_state.Checkpoints
  ) -> tuple[int, State, Extra] | None:
    """Returns the newest valid step with its state; None if none was saved.

    Raises:
      Exceptions of `Checkpointer.restore_latest`.
    """
    self._checkpoints = checkpoints
    arrays = start.with_frozen({})
    self._size = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
    restored = checkpoints.restore(self.checkpointer, start)
    if restored is None:
      return None
    self._restored, state, record = restored
    extra = Extra.of_record(record)
    if extra.unwritten is not None and not self._hosts.is_first:
      extra.unwritten = extra.unwritten[0], []  # dialogues of the first host
    return self._restored, state, extra

  def check(self) -> None:
    """Checks that what was saved is there, and that the folder is ours.

    Raises:
      SaveFailed: the last save has failed; one that goes on is not waited for.
      Lost: another process writes to the folder.
    """
    self.checkpointer.check()
    if self._claim is not None:
      self._claim.check()

  def save(self, step: int, state: State, extra: Extra, *, waits: bool) -> None:
    """Saves a step unless it is saved already; see `Checkpointer.save`."""
    if self._claim is not None:
      self._claim.check()
    try:
      self.checkpointer.wait()
    except pending_save.SaveFailed as error:
      if self._hosts.count > 1:  # the others wait for this one
        raise
      # A newer step replaces it, if it can be saved.
      _log.warning('%s', error)
    assert self._checkpoints is not None  # a state was restored or begun
    self._checkpoints.save(
      self.checkpointer, step, state, extra.record(), waits=waits
    )

  def save_in_time(
    self, step: int, state: State, extra: Extra, since: float | None
  ) -> None:
    """Saves a step at the end of a run, if there is time for it.

    Args:
      step, state, extra: see `save`.
      since: the time of the signal that ends the run; None: there was none.

    Raises:
      NoTime: the step was not saved, on any host.
    """
    line = self._lack_of_time(step, since)
    lines = self._hosts.exchange('time to save', line)
    if any(lines):
      raise NoTime(next(filter(None, lines)))
    self.save(step, state, extra, waits=True)

  def check_room(self) -> None:
    """Raises `NoRoom` if the disk has no room for a checkpoint."""
    line = self._lack_of_room()
    if line:
      raise NoRoom(line)

  def warn_of_room(self, show: Callable[[str], None]) -> None:
    """Shows a line once if the next checkpoint would not fit on the disk."""
    if self.checkpointer.is_saving or not self._hosts.is_first:
      return
    line = self._lack_of_room()
    if line and not self._told_of_room:
      show(f'warning: {line}; the run ends with its next checkpoint')
    self._told_of_room = bool(line)

  def _lack_of_room(self) -> str:
    """Returns what the disk lacks for a checkpoint; '' if nothing."""
    free = shutil.disk_usage(self._workdir).free
    if free >= self._size:
      return ''
    size, free = map(saved_steps.describe_size, (self._size, free))
    return (
      f'{self._workdir}: a checkpoint takes about {size}, and {free} are free'
    )

  def _lack_of_time(self, step: int, since: float | None) -> str:
    """Returns why there is no time to save a step; '' if there is."""
    # A save that has begun is waited for at the end of the process anyway.
    has_begun = step in (self.saved, self.checkpointer.saving)
    if not self._grace or since is None or has_begun:
      return ''
    takes = self.checkpointer.save_seconds
    left = self._grace - (time.monotonic() - since)
    left -= self.checkpointer.seconds_left
    if takes <= left:
      return ''
    return (
      f'not saved: the last save took {takes:.1f} s, and {max(left, 0):.1f} s '
      f'are left of preemption.grace={self._grace:g}'
    )


def rewind(
  writer: writer_lib.Writer | writer_lib.OtherHostWriter,
  step: int,
  extra: Extra,
  *,
  what: str,
  show: Callable[[str], None],
) -> None:
  """Brings the files of a run to the step of its newest checkpoint.

  Args:
    writer: writes the files.
    step: the step; 0 if there is no checkpoint.
    extra: what the checkpoint contains beside the state.
    what: the step's name, such as 'step 3'.
    show: prints what has been found.
  """
  # The line of the step is kept, except where this start writes it: the line of
  # step 0, and the line of a step whose evaluation was interrupted before it
  # was written.
  written = step > 0 and extra.unwritten is None
  aside = writer.rewind(step - (not written), saved=step)
  if aside is not None:
    show(
      f'resumed after {what}, the newest that was saved; metrics and dialogues '
      f'of later ones are in {aside}'
    )
  if written and writer.complete(step, extra.line):
    show(f'metrics.jsonl had lost the line of {what}; it was written again')
