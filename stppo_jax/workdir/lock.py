"""The lock of a folder: only its holder writes to the folder.

    FOLDER/lock    JSON: the host and the process that hold it, and since when

The holder is the process that creates the file, which only one process can do,
on network file systems too. If the holder has ended, another process takes the
lock over. Processes of the holder's host see at once that the holder has ended.
But a holder that still runs in another container of the host looks ended to
them, too. So the holder also locks the file with `flock`, if the file system
has such locks.

Other hosts cannot see that the holder has ended. So the holder touches the file
every few seconds, and another host takes the lock over if the file was not
touched for minutes. A holder that was frozen learns from `Claim.check` whether
it has lost the lock.
"""

from collections.abc import Iterable, Iterator
import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import pathlib
import socket
import tempfile
import threading
import time
from typing import TextIO

from stppo_jax import exits

NAME = 'lock'
_log = logging.getLogger(__name__)
_BOOT_ID = pathlib.Path('/proc/sys/kernel/random/boot_id')
# Seconds between two touches of the file by the holder. After `_MISSING` times
# as long without a touch, another host takes the lock over.
_EVERY = 10.0
_MISSING = 30
# The number of attempts to open a lock that other processes make and remove.
_ATTEMPTS = 10


class Locked(RuntimeError):
  """Another process writes to the folder, or may do so."""

  exit_code = exits.TRY_AGAIN


class Lost(RuntimeError):
  """Another process has taken the lock over: this process must not write."""

  exit_code = exits.TRY_AGAIN


@dataclasses.dataclass(frozen=True)
class Holder:
  """The process that holds a lock.

  Attributes:
    host: the name of the process's host.
    pid: the process's id on that host.
    started: the time at which the process started, in the kernel's units; ''
      if unknown. A later process with the same id has another time.
    since: the time at which the process took the lock.
    touches: always True; earlier versions of this program wait for ever for a
      lock whose file lacks this field.
    boot: the kernel's id of the last boot of the host, which differs between
      hosts with the same name; '' if unknown.
  """

  host: str
  pid: int
  started: str
  since: str
  touches: bool = True
  boot: str = ''

  @property
  def is_here(self) -> bool:
    """Whether the process belongs to this host, so that its end can be seen.

    Names are not enough: if a pod is started again on another machine, its host
    may have the same name as before.
    """
    is_named = self.host == socket.gethostname()
    return is_named and self.boot in ('', _boot())

  @property
  def has_ended(self) -> bool:
    """Whether this host can see that the process has ended."""
    return self.is_here and _started(self.pid) != self.started

  @classmethod
  def of_this_process(cls) -> 'Holder':
    """Returns a holder that describes this process and the present time."""
    since = time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())
    pid, host = os.getpid(), socket.gethostname()
    started = _started(pid) or ''
    return cls(host, pid, started, since, boot=_boot())

  def __str__(self) -> str:
    return f'process {self.pid} on host {self.host}, since {self.since}'


class Claim:
  """The right of this process to write to a folder; the right may be lost."""

  def __init__(self):
    self._ended = threading.Event()

  def check(self) -> None:
    """Raises `Lost` if another process has taken the right over."""

  def touch(self) -> None:
    """Shows that this process lives; raises `Lost` like `check`."""

  def keep_touching(self, every: float) -> None:
    """Calls `touch` every `every` seconds; a thread runs this method.

    The method returns after a call of `end`, or when another process has taken
    the right over. The main thread learns of the loss from `check`.
    """
    while not self._ended.wait(every):
      try:
        self.touch()
      except Lost:
        return
      except OSError:
        pass

  def end(self) -> None:
    """Ends `keep_touching`."""
    self._ended.set()

  def release(self) -> None:
    """Gives up the right, for a process that exits inside `held`."""


class FileClaim(Claim):
  """The lock file of a folder, held by this process."""

  def __init__(self, path: pathlib.Path, holder: Holder):
    super().__init__()
    self._path, self._holder = path, holder

  def check(self) -> None:
    """Raises `Lost` if another process has taken the lock over."""
    try:
      with open(self._path, encoding='utf-8') as file:
        found = _read(file)
    except OSError:  # a user has removed the file
      return
    if found != self._holder:
      raise taken_over(self._path.parent, found)

  def touch(self) -> None:
    """Touches the file; see `Claim`."""
    self.check()
    os.utime(self._path)

  def release(self) -> None:
    """Removes the file; see `Claim`."""
    with contextlib.suppress(OSError, Lost):
      self.check()
      self._path.unlink()


def taken_over(folder: object, holder: Holder | None) -> Lost:
  """Returns the error for a folder that another process has taken over."""
  return Lost(
    f'{folder}: {holder or "another process"} has taken over, because this '
    'process showed no life; this process writes no more'
  )


@contextlib.contextmanager
def held(folder: pathlib.Path, *, every: float = _EVERY) -> Iterator[Claim]:
  """Holds the lock of a folder during the `with` block.

  Args:
    folder: the folder to lock; made if it is missing.
    every: seconds between two touches of the file.

  Raises:
    Locked: another process holds the lock.
    Misconfigured: the folder cannot be made or written.
  """
  with contextlib.ExitStack() as stack:
    # If the start is refused, the folders that it has made are removed again.
    made = [x for x in (folder, *folder.parents) if not x.exists()]
    stack.callback(_remove_empty, made)
    path = folder / NAME
    with exits.as_misconfigured(str(folder)):
      folder.mkdir(parents=True, exist_ok=True)
      file, holder = _acquire(path, every)
    stack.enter_context(file)
    claim = FileClaim(path, holder)
    thread = threading.Thread(
      target=claim.keep_touching, args=(every,), name='lock', daemon=True
    )
    thread.start()
    try:
      yield claim
    finally:
      claim.end()
      # A user may have removed the file, and another process may have made a
      # new file, which must stay.
      with contextlib.suppress(OSError, Lost):
        claim.check()
        if _is_at(file, path):
          path.unlink()


def _remove_empty(folders: Iterable[pathlib.Path]) -> None:
  """Removes folders in the given order, until one of them is not empty."""
  with contextlib.suppress(OSError):
    for folder in folders:
      folder.rmdir()


def holder(folder: pathlib.Path) -> tuple[Holder, bool | None] | None:
  """Returns the holder of a folder's lock, without taking the lock.

  Returns:
    The holder and whether its process runs, as a pair. The second value is None
    if the process belongs to another host. Instead of the pair, the result is
    None if there is no lock, or if the file of the lock names no process.
  """
  try:
    with open(folder / NAME, encoding='utf-8') as file:
      found = _read(file)
  except OSError:
    return None
  if found is None:
    return None
  runs = _started(found.pid) == found.started if found.is_here else None
  return found, runs


def _acquire(path: pathlib.Path, every: float) -> tuple[TextIO, Holder]:
  """Takes the lock; returns its open file, and this process as its holder."""
  for _ in range(_ATTEMPTS):
    with contextlib.suppress(FileExistsError):
      # Mode x lets only one process make the file, on network file systems too.
      file = open(path, 'x+', encoding='utf-8')
      try:
        _flock(file)
        return file, _write(file)
      except BaseException:
        # A lock without a holder would keep other processes out for minutes.
        path.unlink(missing_ok=True)
        # `close` tries again to write the buffer, and may fail again.
        with contextlib.suppress(OSError):
          file.close()
        raise
    with (
      contextlib.suppress(FileNotFoundError),
      contextlib.ExitStack() as stack,
    ):
      file = stack.enter_context(open(path, 'r+', encoding='utf-8'))
      is_free = _flock(file)
      # The holder may have removed the file after this process opened it. Then
      # the next attempt makes a new file.
      if _is_at(file, path):
        holder = _read(file)
        _check(path, holder, is_free, every)
        mine = _write(file)
        _log.info(
          f'{path.parent}: took over the lock of an ended run: '
          + str(holder or 'its file names no process')
        )
        stack.pop_all()  # the file stays open
        return file, mine
  raise Locked(f'{path}: other processes are taking this lock; try again')


def _check(
  path: pathlib.Path, holder: Holder | None, is_free: bool, every: float
) -> None:
  """Checks that the lock may be taken over.

  A lock may be taken over if its holder has ended, or if its holder did not
  touch the file for minutes. A holder that lives cannot touch the file while
  its network is down. So this function waits long enough for another touch, and
  then looks at the file a second time.

  Args:
    path: the lock file.
    holder: the process that the lock names; None if it names no process.
    is_free: whether no process of this host has locked the file with `flock`.
    every: seconds between two touches of the file.

  Raises:
    Locked: the lock may not be taken over.
  """
  folder, who = path.parent, holder or 'an unknown process'
  has_ended = holder is not None and holder.has_ended
  is_here = holder is not None and holder.is_here
  if not is_free or (is_here and not has_ended):
    raise Locked(
      f'{folder}: locked by {who}; wait for its end, or use another folder'
    )
  if has_ended:
    return
  silence, touched = _MISSING * every, path.stat().st_mtime
  age = _now(folder) - touched
  if age > silence:
    _log.info(
      f'{folder}: locked by {who}, silent for {age:.0f} s; this start takes '
      f'over in {2 * every:.0f} s unless the holder touches the lock'
    )
    time.sleep(2 * every)
  if age <= silence or path.stat().st_mtime != touched:
    raise Locked(
      f'{folder}: locked by {who}, which showed life {max(age, 0):.0f} s ago; '
      f'once it is silent for {silence:.0f} s, a start takes over'
    )


def _now(folder: pathlib.Path) -> float:
  """Returns the time by the clock of a folder's file system."""
  with tempfile.TemporaryFile(dir=folder) as file:
    file.write(b'x')
    file.flush()
    return os.fstat(file.fileno()).st_mtime


def _flock(file: TextIO) -> bool:
  """Locks the file with `flock`; returns False if another process locked it.

  The result is True on a file system without such locks.
  """
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  except OSError:  # the file system has no such locks
    return True
  return True


def _is_at(file: TextIO, path: pathlib.Path) -> bool:
  """Returns whether an open file is the file that a path names now."""
  return os.path.samestat(os.fstat(file.fileno()), os.stat(path))


def _write(file: TextIO) -> Holder:
  """Writes this process into the file as the holder, and returns the holder.

  If two hosts take the lock over at once, the later write stays in the file.
  This function does not read the file again. So the host whose holder was
  overwritten learns only from `Claim.check` that it has lost the lock.
  """
  holder = Holder.of_this_process()
  file.seek(0)
  file.truncate()
  file.write(json.dumps(dataclasses.asdict(holder)) + '\n')
  file.flush()
  os.fsync(file.fileno())  # so that other hosts see the holder
  return holder


def _boot() -> str:
  """Returns the kernel's id of this host's last boot; '' if there is no id."""
  try:
    return _BOOT_ID.read_text('ascii').strip()
  except OSError:
    return ''


def _read(file: TextIO) -> Holder | None:
  """Returns the holder that a lock file names; None if it names no process."""
  try:
    holder = Holder(**json.loads(file.read()))
  except (ValueError, TypeError, RecursionError):
    return None
  return holder if type(holder.pid) is int and holder.pid > 0 else None


def _started(pid: int) -> str | None:
  """Returns when a process of this host started; None if it has ended.

  The time is text in the kernel's units; it is '' on systems without /proc.
  """
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return None
  except PermissionError:  # the process runs, and belongs to another user
    pass
  try:
    text = pathlib.Path('/proc', str(pid), 'stat').read_text(encoding='utf-8')
  except OSError:
    return ''
  # `state` is the third field of proc(5). The text is cut after the second
  # field, the name of the program in brackets, which may contain any character.
  state, *fields = text.rpartition(')')[2].split()
  return None if state == 'Z' else fields[18]
