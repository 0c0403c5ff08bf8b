"""The heartbeat of a run: a small file that says what the run does now.

    WORKDIR/heartbeat.json    {"phase": "update", "step": 12, "time": ..., ...}

A thread replaces the file every few seconds, and sooner when a field has
changed, but at most once a second. If the time in the file is old, the process
has ended or is out of reach. The last write adds the exit code. Other programs
can read the file as JSON, without this package.
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
_EVERY = 5.0  # seconds between two writes if no field changes
_SHORTEST = 1.0  # the shortest time between two writes, in seconds


@dataclasses.dataclass
class Beat:
  """The content of heartbeat.json; times are in seconds since 1970.

  Attributes:
    host: the name of the machine that writes the file.
    pid: the id of the process that writes the file.
    hosts: the names of the machines of all hosts of the run.
    phase: the present phase of the run, such as start, wait (for the
      collection), annotate, update, step (of sft and prefer), evaluate,
      checkpoint, export, or end.
    phase_since: the time at which the phase began.
    step: the number of steps that are done.
    num_steps: the number of steps of the whole run; 0 while it is not known.
    time: the time at which the file was written.
    exit_code: the exit code of the process; None while the process runs.
    error: the first line of the error that has ended the process; '' if there
      was no error.
    began: the time at which the first start of the run began.
    restarts: how often the run was started again.
    lost_steps: the number of steps that were done, and then lost because a
      restart went on from an earlier step.
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
  """Writes the heartbeat of a run during the `with` block of `written`.

  If the file cannot be written, the error is ignored: a run must not end
  because nobody can watch it.

  Args:
    exit_code: returns the exit code of the process; called if the `with` block
      of `written` ends without an error.

  Attributes:
    beat: the content of the file.
  """

  def __init__(self, exit_code: Callable[[], int]):
    self._exit_code = exit_code
    self.beat = Beat()
    self._folder: pathlib.Path | None = None
    self._claim: lock.Claim | None = None
    # The number of steps that were done when the previous start ended; after
    # `resume`, the number of steps that this start goes on from.
    self._done = 0
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
    """Writes the file regularly during the `with` block, and at its end.

    Args:
      folder: the run's folder.
      hosts: the names of the machines of all hosts.
      claim: the lock of the folder; None without a lock. Once another process
        has taken the lock over, this process no longer writes the file.
    """
    self._folder, self._claim = folder, claim
    self.beat.began = self.beat.phase_since = time.time()
    before = read(folder)
    if before is not None:
      self.beat.began = before.began or self.beat.began
      self.beat.restarts = before.restarts + 1
      self.beat.lost_steps = before.lost_steps
      # The old number of steps stays in the file until `resume`: if this
      # process is killed before, the next start still needs the number.
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
      # The thread must end before the last write, which it could overwrite.
      self._ended.set()
      self._changed.set()
      thread.join()
      self.end(self.beat.exit_code)

  def end(self, exit_code: int | None) -> None:
    """Writes the file for the last time, with the exit code.

    `written` calls this method at the end of its `with` block. A process that
    exits inside the block calls the method itself. Before `written` is entered,
    the method writes nothing.
    """
    self._ended.set()
    self.beat.exit_code = exit_code
    self.enter_phase('end')
    self._write()

  def enter_phase(self, phase: str) -> None:
    """Sets the phase that begins now; '' changes nothing."""
    if not phase:
      return
    self.beat.phase, self.beat.phase_since = phase, time.time()
    self._changed.set()

  def count(self, step: int, num_steps: int) -> None:
    """Sets the number of done steps, and the number of steps of the run."""
    self.beat.step, self.beat.num_steps = step, num_steps
    self._changed.set()

  def resume(self, step: int, done: int) -> None:
    """Counts the steps that a restart has lost.

    Args:
      step: the number of steps that are kept, which are in the checkpoint.
      done: the last step that has a line in metrics.jsonl.
    """
    self.beat.lost_steps += max(self._done - step, done - step, 0)
    self._done = step
    # The file is written at once, because this start will remove the metrics of
    # the lost steps, and a later start could not count these steps again.
    self._write()

  def _keep_writing(self) -> None:
    # The first wait limits how often the file is written. The second wait ends
    # when a field changes, or when the file gets old.
    while not self._ended.wait(_SHORTEST):
      self._changed.wait(_EVERY)
      self._changed.clear()
      if not self._ended.is_set():
        self._write()

  def _write(self) -> None:
    """Replaces the file as a whole, so that no reader finds half a file."""
    if self._folder is None:  # only the first host enters `written`
      return
    self.beat.time = time.time()
    text = json.dumps(dataclasses.asdict(self.beat)) + '\n'
    with self._writing, contextlib.suppress(OSError, lock.Lost):
      if self._claim is not None:
        self._claim.check()
      atomic_files.replace(self._folder / NAME, text.encode())


def read(folder: pathlib.Path) -> Beat | None:
  """Returns the last heartbeat of a run; None if it cannot be read."""
  try:
    fields = json.loads((folder / NAME).read_text('utf-8'))
    # A newer version of this program may write further fields.
    known = {field.name for field in dataclasses.fields(Beat)}
    beat = Beat(**{name: x for name, x in fields.items() if name in known})
  except (OSError, ValueError, AttributeError, RecursionError):
    return None
  return beat if _is_sound(beat) else None


def _is_sound(beat: Beat) -> bool:
  """Returns whether all fields have the right types.

  Another program, or a user, may have written the file.
  """
  numbers = (beat.pid, beat.step, beat.num_steps, beat.restarts)
  numbers += (beat.lost_steps, beat.time, beat.phase_since, beat.began)
  texts = (beat.host, beat.phase, beat.error)
  return (
    all(type(x) in (int, float) and math.isfinite(x) for x in numbers)
    and all(isinstance(x, str) for x in texts)
    and isinstance(beat.hosts, list | tuple)
    and type(beat.exit_code) in (int, type(None))
  )
