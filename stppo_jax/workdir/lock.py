"""The lock of a folder: one process at a time writes there.

    FOLDER/lock    JSON: the host and the process that hold it, and since when

The file is made exclusively, which network file systems can do too. The lock of
a process that has ended is taken over. On the host of that process this can be
seen at once. A process may also look ended because it runs in another container
of the host. So its holder keeps the file locked with `flock` too, where the
file system has such locks.

No other host can see that a process has ended. So a holder touches the file
every few seconds, and another host takes the lock over when that has not
happened for minutes. A holder that was only frozen finds out by `Claim.check`.
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
# Seconds between two touches of the file, and the number of missing touches
# after which another host takes the lock over.
_EVERY = 10.0
_MISSING = 30
# Attempts to open a lock that other processes make and remove.
_ATTEMPTS = 10


class Locked(RuntimeError):
  """Another process writes to the folder, or may do so."""

  exit_code = exits.TRY_AGAIN


class Lost(RuntimeError):
  """Another process has taken the lock over: this one must not write."""

  exit_code = exits.TRY_AGAIN


@dataclasses.dataclass(frozen=True)
class Holder:
  """The process that holds a lock.

  Attributes:
    host: the name of its host.
    pid: its number on that host.
    started: the time of its start, in the kernel's count; '' if unknown. It
      tells the process from a later one of the same number.
    since: the time at which it took the lock.
    touches: true; earlier versions wait for ever for a lock without it.
    boot: the kernel's number of the host's start, which differs between hosts
      of the same name; '' if unknown.
  """

  host: str
  pid: int
  started: str
  since: str
  touches: bool = True
  boot: str = ''

  @property
  def is_here(self) -> bool:
    """Whether this host can see if the process runs.

    A pod that is started again elsewhere may have the name of the one before.
    """
    is_named = self.host == socket.gethostname()
    return is_named and self.boot in ('', _boot())

  @property
  def has_ended(self) -> bool:
    """Whether this host can see that the process has ended."""
    return self.is_here and _started(self.pid) != self.started

  @classmethod
  def of_this_process(cls) -> 'Holder':
    """Returns a holder that stands for this process, from now on."""
    since = time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())
    pid, host = os.getpid(), socket.gethostname()
    started = _started(pid) or ''
    return cls(host, pid, started, since, boot=_boot())

  def __str__(self) -> str:
    return f'process {self.pid} on host {self.host}, since {self.since}'


class Claim:
  """The right of this process to write to a folder, until another takes it."""

  def __init__(self):
    self._ended = threading.Event()

  def check(self) -> None:
    """Raises `Lost` if another process has taken over."""

  def touch(self) -> None:
    """Shows others that this process lives; raises `Lost` as `check` does."""

  def keep_touching(self, every: float) -> None:
    """Shows life every so many seconds; a thread runs this.

    It ends with `end`, or once another process has taken over, which the main
    thread finds out by `check`.
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
    """Gives the folder up; for a process that ends inside `held`."""


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
    except OSError:  # removed by hand
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
  """Returns the error that another process has taken a folder over."""
  return Lost(
    f'{folder}: {holder or "another process"} has taken over, because this '
    'process showed no life; this process writes no more'
  )


@contextlib.contextmanager
def held(folder: pathlib.Path, *, every: float = _EVERY) -> Iterator[Claim]:
  """Holds the lock of a folder; makes the folder if it is missing.

  Args:
    folder: the folder to lock.
    every: seconds between two touches of the file.

  Raises:
    Locked: another process holds the lock.
    Misconfigured: the folder cannot be made or written.
  """
  with contextlib.ExitStack() as stack:
    # A start that is refused leaves nothing, not even the folders it has made.
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
      # Somebody may have removed the file, and another process made its own.
      with contextlib.suppress(OSError, Lost):
        claim.check()
        if _is_at(file, path):
          path.unlink()


def _remove_empty(folders: Iterable[pathlib.Path]) -> None:
  """Removes folders, the innermost first, as far as they are empty."""
  with contextlib.suppress(OSError):
    for folder in folders:
      folder.rmdir()


def holder(folder: pathlib.Path) -> tuple[Holder, bool | None] | None:
  """Returns who holds the lock of a folder, without taking it.

  Returns:
    None if there is no lock, or if its file names nobody. Otherwise the holder,
    and whether that process runs; the latter is None for a process of another
    host.
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
  """Acquires the lock; returns its open file and its holder, this process."""
  for _ in range(_ATTEMPTS):
    with contextlib.suppress(FileExistsError):
      # Only one process can make the file, also on network file systems.
      file = open(path, 'x+', encoding='utf-8')
      try:
        _flock(file)
        return file, _write(file)
      except BaseException:
        # A lock that names nobody would keep others out for minutes.
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it tries to write once more
          file.close()
        raise
    with (
      contextlib.suppress(FileNotFoundError),
      contextlib.ExitStack() as stack,
    ):
      file = stack.enter_context(open(path, 'r+', encoding='utf-8'))
      is_free = _flock(file)
      # Its holder may have removed the file between `open` and here. Then the
      # next attempt makes a new one.
      if _is_at(file, path):
        holder = _read(file)
        _check(path, holder, is_free, every)
        mine = _write(file)
        _log.info(
          f'{path.parent}: took over the lock of an ended run: '
          + str(holder or 'its file names nobody')
        )
        stack.pop_all()  # it stays open
        return file, mine
  raise Locked(f'{path}: other processes are taking this lock; try again')


def _check(
  path: pathlib.Path, holder: Holder | None, is_free: bool, every: float
) -> None:
  """Raises `Locked` unless the holder has ended, or is silent for long.

  If the network was gone, a holder that lives is silent too. So the file is
  looked at a second time, when its holder must have touched it.

  Args:
    path: the lock.
    holder: who holds it; None if it names nobody.
    is_free: whether no process of this host has locked the file.
    every: seconds between two touches of the file.
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
      f'{folder}: locked by {who}, silent for {age:.0f} s; taking over in '
      f'{2 * every:.0f} s unless it shows life'
    )
    time.sleep(2 * every)
  if age <= silence or path.stat().st_mtime != touched:
    raise Locked(
      f'{folder}: locked by {who}, which showed life {max(age, 0):.0f} s ago; '
      f'once it is silent for {silence:.0f} s, a start takes over'
    )


def _now(folder: pathlib.Path) -> float:
  """Returns the time by the clock that dates the files of a folder."""
  with tempfile.TemporaryFile(dir=folder) as file:
    file.write(b'x')
    file.flush()
    return os.fstat(file.fileno()).st_mtime


def _flock(file: TextIO) -> bool:
  """Locks the file; returns False if another process has locked it."""
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  except OSError:  # a file system without such locks
    return True
  return True


def _is_at(file: TextIO, path: pathlib.Path) -> bool:
  """Returns whether an open file is the one at a path."""
  return os.path.samestat(os.fstat(file.fileno()), os.stat(path))


def _write(file: TextIO) -> Holder:
  """Writes this process as the holder, and returns it.

  Two hosts may take over at one moment, so it is not read back: both would read
  the one that wrote last, and neither would find out.
  """
  holder = Holder.of_this_process()
  file.seek(0)
  file.truncate()
  file.write(json.dumps(dataclasses.asdict(holder)) + '\n')
  file.flush()
  os.fsync(file.fileno())  # other hosts see it
  return holder


def _boot() -> str:
  """Returns the kernel's number of this host's start; '' without one."""
  try:
    return _BOOT_ID.read_text('ascii').strip()
  except OSError:
    return ''


def _read(file: TextIO) -> Holder | None:
  """Returns the holder; None if the file does not name one."""
  try:
    holder = Holder(**json.loads(file.read()))
  except (ValueError, TypeError, RecursionError):
    return None
  return holder if type(holder.pid) is int and holder.pid > 0 else None


def _started(pid: int) -> str | None:
  """Returns when a process of this host started; None if it has ended.

  The time is '' on systems without /proc.
  """
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return None
  except PermissionError:  # the process is another user's
    pass
  try:
    text = pathlib.Path('/proc', str(pid), 'stat').read_text(encoding='utf-8')
  except OSError:
    return ''
  # The fields are those of proc(5), from the third one: the second is the name
  # of the program in brackets, which may contain anything.
  state, *fields = text.rpartition(')')[2].split()
  return None if state == 'Z' else fields[18]
