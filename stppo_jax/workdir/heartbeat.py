"""The heartbeat of a run: a small file that says what the run does now.

    WORKDIR/heartbeat.json    {"phase": "update", "step": 12, "time": ..., ...}

A thread replaces the file when something has changed, at most once a second,
and otherwise every few seconds. A file whose time is old therefore belongs to a
process that has ended or is out of reach. The last write adds the exit code.
Readers need nothing of this package but the names of the fields.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import socket
import threading
import time

from stppo_jax import exits
from stppo_jax.workdir import atomic_files
from stppo_jax.workdir import lock

NAME = 'heartbeat.json'
_EVERY = 5.0  # seconds between two writings in which nothing changes
_SHORTEST = 1.0  # seconds between two writings in which something does


@dataclasses.dataclass
class Beat:
  """The content of the file; times are in seconds since 1970.

  Attributes:
    host: the name of the machine that writes the file.
    pid: the number of the process that writes it.
    hosts: the names of the machines of all hosts of the run.
    phase: what the run does: start, wait (for the collection), annotate,
      update, step (of sft and prefer), evaluate, checkpoint, export, or end.
    phase_since: the time at which the phase began.
    step: the number of steps that are done.
    num_steps: the length of the run; 0 while it is not known.
    time: the time of this writing.
    exit_code: the exit code of the process; None while it runs.
    error: the first line of the error that has ended it; '' for none.
    began: the time at which the first start of the run began.
    restarts: how often the run was started again.
    lost_steps: the number of steps that were done, and lost by a restart.
  """

  host: str = ''
  pid: int = 0
  hosts: Sequence[str] = ()
  phase: str = 'start'
  phase_since: float = 0.0
  step: int = 0
  num_steps: int = 0
  time: float = 0.0
  exit_code: int | None = None
  error: str = ''
  began: float = 0.0
  restarts: int = 0
  lost_steps: int = 0


class Heartbeat:
  """Writes the heartbeat of a run while the body of `written` runs.

  If the file cannot be written, the error is ignored: a run must not end
  because nobody can watch it.

  Args:
    exit_code: a function that returns the exit code of the process, if the body
      of `written` ends without an error.

  Attributes:
    beat: the content of the file.
  """

  def __init__(self, exit_code: Callable[[], int]):
    self._exit_code = exit_code
    self.beat = Beat()
    self._folder: pathlib.Path | None = None
    self._claim: lock.Claim | None = None
    self._done = 0  # steps that the start before has done
    self._writing = threading.Lock()
    self._changed = threading.Event()
    self._ended = threading.Event()

  @contextlib.contextmanager
  def written(
    self,
    folder: pathlib.Path,
    hosts: Sequence[str],
    claim: lock.Claim | None = None,
  ) -> Iterator[None]:
    """Writes the file during the body, and once more at its end.

    Args:
      folder: the run's folder.
      hosts: the names of the machines of all hosts.
      claim: the lock of the folder, if it has one. Once another process has
        taken the lock over, this one no longer writes the file.
    """
    self._folder, self._claim = folder, claim
    self.beat.began = self.beat.phase_since = time.time()
    before = read(folder)
    if before is not None:
      self.beat.began = before.began or self.beat.began
      self.beat.restarts = before.restarts + 1
      self.beat.lost_steps = before.lost_steps
      # Kept until `resume`: if this process is killed before, the next one must
      # still know of these steps.
      self.beat.step = self._done = before.step
    self.beat.host, self.beat.pid = socket.gethostname(), os.getpid()
    self.beat.hosts = list(hosts)
    self._write()
    thread = threading.Thread(
      target=self._keep_writing, name='heartbeat', daemon=True
    )
    thread.start()
    try:
      yield
      self.beat.exit_code = self._exit_code()
    except BaseException as error:
      self.beat.exit_code = getattr(error, 'exit_code', exits.BUG)
      text = str(error) or type(error).__name__
      self.beat.error = text.partition('\n')[0]
      raise
    finally:
      # First the thread ends: it could write an older state over the last one.
      self._ended.set()
      self._changed.set()
      thread.join()
      self.end(self.beat.exit_code)

  def end(self, exit_code: int | None) -> None:
    """Writes the file a last time, also before the body of `written` ends.

    Nothing is written before `written` is entered.
    """
    self._ended.set()
    self.beat.exit_code = exit_code
    self.enter_phase('end')
    self._write()

  def enter_phase(self, phase: str) -> None:
    """Says what the run does from now on; '' changes nothing."""
    if not phase:
      return
    self.beat.phase, self.beat.phase_since = phase, time.time()
    self._changed.set()

  def count(self, step: int, num_steps: int) -> None:
    """Says how many steps are done, and how many the run has."""
    self.beat.step, self.beat.num_steps = step, num_steps
    self._changed.set()

  def resume(self, step: int, done: int) -> None:
    """Says how many steps are kept; those done after them are lost.

    Args:
      step: the number of steps that are kept.
      done: the number of steps that the start before has left records of.
    """
    self.beat.lost_steps += max(self._done - step, done - step, 0)
    self._done = step
    # Written at once: a later start drops these records, and could not count
    # them.
    self._write()

  def _keep_writing(self) -> None:
    # The first wait bounds how often the file is written, the second one how
    # old it gets while nothing changes.
    while not self._ended.wait(_SHORTEST):
      self._changed.wait(_EVERY)
      self._changed.clear()
      if not self._ended.is_set():
        self._write()

  def _write(self) -> None:
    """Replaces the file, so that readers find the old one or the new one."""
    if self._folder is None:  # of several hosts, the first one writes
      return
    self.beat.time = time.time()
    text = json.dumps(dataclasses.asdict(self.beat)) + '\n'
    with self._writing, contextlib.suppress(OSError, lock.Lost):
      if self._claim is not None:
        self._claim.check()
      atomic_files.replace(self._folder / NAME, text.encode())


def read(folder: pathlib.Path) -> Beat | None:
  """Returns the last heartbeat of a run; None if there is none to be read."""
  try:
    fields = json.loads((folder / NAME).read_text('utf-8'))
    # A newer version may write fields that this one does not know.
    known = {field.name for field in dataclasses.fields(Beat)}
    beat = Beat(**{name: x for name, x in fields.items() if name in known})
  except (OSError, ValueError, AttributeError, RecursionError):
    return None
  return beat if _is_sound(beat) else None


def _is_sound(beat: Beat) -> bool:
  """Returns whether the fields have their types: others may write the file."""
  numbers = (beat.pid, beat.step, beat.num_steps, beat.restarts)
  numbers += (beat.lost_steps, beat.time, beat.phase_since, beat.began)
  texts = (beat.host, beat.phase, beat.error)
  return (
    all(type(x) in (int, float) and math.isfinite(x) for x in numbers)
    and all(isinstance(x, str) for x in texts)
    and isinstance(beat.hosts, list | tuple)
    and type(beat.exit_code) in (int, type(None))
  )
