"""The faults of `benchmarks.chaos`.

Each of `FAULTS` strikes a run, and returns whether its effect was seen. A fault
may have no effect: a signal may come when a process has just ended, an outage
may come when there is no request, and damage may hit a byte that is never read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import os
import pathlib
import random as random_lib
import resource
import select
import signal
import socket
import subprocess
import time

from benchmarks import disturbed_run
from benchmarks import run_differences

_PATIENCE = 60.0  # seconds in which the effect of a fault must be seen
_START_PATIENCE = 240.0  # the same for a fault whose effect is seen at a start
_POLL = 0.05
_ESTABLISHED, _LISTEN = '01', '0A'  # states of sockets in /proc/net/tcp

DisturbedRun = disturbed_run.DisturbedRun
Random = random_lib.Random
Fault = Callable[[DisturbedRun, Random], bool]


def _send(number: signal.Signals) -> Fault:
  """Returns a fault: a signal to one process, which ends all processes."""

  def strike(run: DisturbedRun, random: Random) -> bool:
    victim = random.choice(run.processes)
    run.send(victim, number)
    run.wait()
    codes = {signal.SIGTERM: 75, signal.SIGINT: 130}
    return run.codes[victim.pid] in (-number, codes.get(number))

  return strike


def _pause(run: DisturbedRun, random: Random) -> bool:
  """Stops the run for a moment, as an overloaded machine does."""
  return _stop(run.processes, random.uniform(0.5, 3))


def _slow_host(run: DisturbedRun, random: Random) -> bool:
  """Stops one process for longer, while the others wait for it."""
  return _stop([random.choice(run.processes)], random.uniform(3, 10))


def _stop(processes: Sequence[subprocess.Popen], seconds: float) -> bool:
  for process in processes:
    process.send_signal(signal.SIGSTOP)
  time.sleep(seconds)
  stopped = [_state(process.pid) == 'T' for process in processes]
  for process in processes:
    process.send_signal(signal.SIGCONT)
  return all(stopped)


def _state(pid: int) -> str:
  """Returns the state of a process, such as R, S or T; '' if it is gone."""
  with contextlib.suppress(OSError):
    text = pathlib.Path(f'/proc/{pid}/stat').read_text('ascii', 'replace')
    return text.rpartition(')')[2].split()[0]
  return ''


def _clock_jump(run: DisturbedRun, random: Random) -> bool:
  """Shifts the clock of the run by up to a day, and does not set it back."""
  offset = random.uniform(-86400, 86400)
  new = run.clock.with_suffix('.new')
  new.write_text(f'{offset:.3f}', 'ascii')
  os.replace(new, run.clock)

  def is_seen() -> bool:
    beat = run.beat
    return beat is not None and abs(beat.time - time.time() - offset) < 60

  return _comes(run, is_seen)


def _slow_retriever(run: DisturbedRun, random: Random) -> bool:
  """Stops the retriever until a request waits for it, and a little longer."""
  assert run.retriever is not None
  run.retriever.send_signal(signal.SIGSTOP)
  try:
    waits = _comes(run, lambda: _unread_bytes(run.port) > 0)
    time.sleep(random.uniform(0.5, 5))
  finally:
    run.retriever.send_signal(signal.SIGCONT)
  return waits


def _unread_bytes(port: int) -> int:
  """Returns the number of unread bytes and of waiting connections at a port.

  The two numbers are added.
  """
  waiting = 0
  for line in pathlib.Path('/proc/net/tcp').read_text('ascii').splitlines()[1:]:
    _, local, _, state, queues, *_ = line.split()
    is_ours = int(local.partition(':')[2], 16) == port
    if is_ours and state in (_ESTABLISHED, _LISTEN):
      waiting += int(queues.partition(':')[2], 16)
  return waiting


def _outage(run: DisturbedRun, random: Random) -> bool:
  """Kills the retriever, and starts it again after a request has failed.

  At first nothing listens at the port of the retriever. Then connections to the
  port are accepted, and closed at once.
  """
  assert run.retriever is not None
  run.retriever.kill()
  run.retriever.wait()
  time.sleep(random.uniform(0, 2))
  with contextlib.ExitStack() as stack:
    door = stack.enter_context(_closed_door(run.port))
    is_missed = _comes(run, door)
    end = time.monotonic() + random.uniform(0.5, 5)
    while time.monotonic() < end:
      door()
  run.start_retriever()
  return is_missed


@contextlib.contextmanager
def _closed_door(port: int) -> Iterator[Callable[[], bool]]:
  """Listens at a port; yields a function that turns away the next client.

  The function closes the connection of a client that has come. It returns
  whether a client came within a short time.
  """
  with socket.socket() as door:
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    door.bind(('127.0.0.1', port))
    door.listen()

    def turn_away() -> bool:
      if not select.select([door], [], [], _POLL)[0]:
        return False
      door.accept()[0].close()
      return True

    yield turn_away


def _full_disk(run: DisturbedRun, random: Random) -> bool:
  """Limits the files of the run to a few bytes, as if the disk were full.

  The limit is removed soon after the run has reported that a file cannot grow.
  """
  struck, before = list(run.processes), run.full
  _limit_files(struck, 1024)
  try:
    is_seen = _comes(run, lambda: run.full > before)
    time.sleep(random.uniform(0, 2))
  finally:
    _limit_files(struck, None)
  return is_seen or run.full > before


def _limit_files(
  processes: Sequence[subprocess.Popen], size: int | None
) -> None:
  """Limits each file that processes write to some bytes; None = no limit."""
  for process in processes:
    with contextlib.suppress(ProcessLookupError):
      _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
      limit = hard if size is None else size
      resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, hard))


def _corrupt(run: DisturbedRun, random: Random) -> bool:
  """Kills the run, damages its newest checkpoint, and starts it again.

  The fault has struck if the run has set the damaged checkpoint aside.
  """
  victim = random.choice(run.processes)
  run.send(victim, signal.SIGKILL)
  run.wait()
  steps = sorted(run_differences.steps(run.workdir))
  if len(steps) < 2:  # a run without an intact checkpoint cannot go on
    return False
  newest = run.workdir / 'checkpoints' / str(steps[-1])
  _damage(newest, random)
  aside = newest.with_name(f'{newest.name}.corrupt')
  run.start_again()
  return _comes(
    run, aside.exists, ends=lambda: run.has_made_step, patience=_START_PATIENCE
  )


def _damage(folder: pathlib.Path, random: Random) -> None:
  """Cuts one of the files of a folder in half, or flips one of its bits.

  A large file is chosen more often than a small file, because a disk can fail
  at any byte, and because some of the small files are not read.
  """
  files = [p for p in sorted(folder.rglob('*')) if p.is_file()]
  (path,) = random.choices(files, [path.stat().st_size for path in files])
  data = bytearray(path.read_bytes())
  if random.random() < 0.5:
    data = data[: len(data) // 2]
  else:
    place = random.randrange(len(data))
    data[place] ^= 1 << random.randrange(8)
  path.write_bytes(data)


def _comes(
  run: DisturbedRun,
  is_seen: Callable[[], bool],
  *,
  ends: Callable[[], bool] = lambda: False,
  patience: float = _PATIENCE,
) -> bool:
  """Waits until the effect of a fault is seen; returns whether it was seen.

  Args:
    run: the run. When it has ended, the wait ends, too.
    is_seen: returns whether the effect is seen.
    ends: returns whether the effect can no longer come.
    patience: the most seconds to wait.
  """
  end = time.monotonic() + patience
  while time.monotonic() < end:
    is_last = not run.goes_on or ends()
    if is_seen():
      return True
    if is_last:
      return False
    time.sleep(_POLL)
  return False


FAULTS: Mapping[str, Fault] = {
  'kill -9': _send(signal.SIGKILL),
  'SIGTERM': _send(signal.SIGTERM),
  'SIGINT': _send(signal.SIGINT),
  'paused run': _pause,
  'slow host': _slow_host,
  'clock jump': _clock_jump,
  'slow retriever': _slow_retriever,
  'outage of the retriever': _outage,
  'full disk': _full_disk,
  'corrupt checkpoint': _corrupt,
}
