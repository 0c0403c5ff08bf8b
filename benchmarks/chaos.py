"""Strikes a run with faults until many have struck, and compares its result.

    python -m benchmarks.chaos
    python -m benchmarks.chaos --faults=10 --seed=3 --hosts=1 --folder=DIR

A supervisor trains the quickstart, made small, as two processes (`--hosts`)
that ask a retrieval server in another one. At random moments, which follow from
the seed, one of `FAULTS` strikes. Whenever the run has ended, the same command
starts it again. When enough faults have struck, the run goes on to its end, and
an undisturbed run of the same length is made. These must be equal, bit for bit:

- the exported weights, and the fingerprints of the last checkpoint;
- every number of metrics.jsonl but times and counts of the faults themselves,
  and every dialogue.

While a disk is full, lines of metrics and dialogues may be lost, as is
promised; then those that are there are compared. The exit code is 1 if anything
differs, if a process ends with a code that no fault explains, or if one waits
for another that has ended.
"""

import argparse
import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import os
import pathlib
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from benchmarks import run_differences

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_BLOCK = 10  # steps by which the run becomes longer while faults are left
_KEPT_LINES = 40  # of the run's output, printed if it fails
_TOGETHER = 120.0  # seconds in which all processes of a run have ended
_START_TIMEOUT = 60.0  # seconds that they wait for each other at a start
_POLL = 0.05
_SMALL = {
  'rollout.trajectories_per_step': 32,
  'updates.minibatch_size': 16,
  'evaluate.every': 5,
  'evaluate.num_questions': 16,
  'checkpoint.every': 1,
  'checkpoint.keep': 3,
  'writer.samples': 0,
  # No trajectory may fail: it would be missing in the batch.
  'rollout.min_valid_fraction': 1.0,
}
# Codes with which a run may end. A signal that comes before Python has begun
# ends the process itself.
_EXPECTED = {
  0,
  75,
  130,
  *(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)),
}


class Failed(Exception):
  """The run has broken a promise; the message says which."""


class Chaos:
  """A run, its retrieval server, and the faults that strike them.

  Args:
    folder: holds the folder of the run.
    seed: decides which faults strike, and when.
    hosts: the number of processes that train together.
    overrides: further flags of `train`.

  Attributes:
    processes: the processes of the run, while it goes on.
    clock: the file of `jumping_clock`.
    struck: how often each fault has struck.
    starts: how often the run was started.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    seed: int,
    *,
    hosts: int = 1,
    overrides: Sequence[str] = (),
  ):
    self.workdir = folder / 'disturbed'
    self.clock = folder / 'clock'
    self.random = random.Random(seed)
    self.struck: collections.Counter = collections.Counter()
    self.starts = 0
    self._hosts, self._overrides = hosts, overrides
    self._port = _free_port()
    self.processes: list[subprocess.Popen] = []
    self.retriever: subprocess.Popen | None = None
    self._output: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)

  def commands(
    self, workdir: pathlib.Path, num_steps: int
  ) -> Iterator[list[str]]:
    """Yields the command of each process of a run of that length."""
    values = _SMALL | {
      'num_steps': num_steps,
      'retrieval.url': f'http://127.0.0.1:{self._port}',
    }
    command = [
      *(sys.executable, '-m', 'benchmarks.jumping_clock', str(self.clock)),
      *('train', '--config=configs/quickstart.py:st_ppo'),
      f'--workdir={workdir}',
      *(f'--config.{key}={value}' for key, value in values.items()),
      *self._overrides,
    ]
    if self._hosts == 1:
      yield command
      return
    address = f'127.0.0.1:{_free_port()}'
    for index in range(self._hosts):
      yield command + [
        f'--coordinator={address}',
        f'--num_processes={self._hosts}',
        f'--process_id={index}',
        f'--start_timeout={_START_TIMEOUT}',
      ]

  def start_retriever(self) -> None:
    self.retriever = subprocess.Popen(
      [
        *(sys.executable, '-m', 'stppo_jax', 'serve', '--synthetic_seed=0'),
        f'--port={self._port}',
      ],
      cwd=_ROOT,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )

  def start(self, workdir: pathlib.Path, num_steps: int) -> None:
    """Starts the run, whose output is kept for the case that it fails."""
    self.starts += 1
    for command in self.commands(workdir, num_steps):
      process = subprocess.Popen(
        command,
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors='replace',
      )
      self.processes.append(process)
      threading.Thread(target=self._read, args=(process,), daemon=True).start()

  def _read(self, process: subprocess.Popen) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
      self._output.extend(lines)

  def wait(self, seconds: float | None = None) -> int | None:
    """Returns the run's exit code; None if it goes on after some seconds.

    Raises:
      Failed: nothing explains a code, or a process goes on without the others.
    """
    assert self.processes
    end = None if seconds is None else time.monotonic() + seconds
    ended_since: float | None = None
    while True:
      codes = [process.poll() for process in self.processes]
      if None not in codes:
        break
      if any(code is not None for code in codes):
        ended_since = ended_since or time.monotonic()
        if time.monotonic() > ended_since + _TOGETHER:
          raise self._failed(f'a process goes on without the others: {codes}')
      elif end is not None and time.monotonic() > end:
        return None
      time.sleep(_POLL)
    self.processes = []
    unexpected = [code for code in codes if code not in _EXPECTED]
    if unexpected:
      raise self._failed(f'exit code {unexpected[0]}')
    return next((code for code in codes if code), 0)

  def _failed(self, what: str) -> Failed:
    return Failed(f'{what}:\n{"".join(self._output)}')

  def victim(self) -> subprocess.Popen:
    """Returns one of the processes of the run."""
    return self.random.choice(self.processes)

  def strike(self) -> None:
    """Lets a fault strike, chosen at random."""
    name = self.random.choice(sorted(FAULTS))
    FAULTS[name](self)
    self.struck[name] += 1

  def close(self) -> None:
    for process in (*self.processes, self.retriever):
      if process is not None and process.poll() is None:
        process.kill()
        process.wait()


def _free_port() -> int:
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]


def _send(number: signal.Signals) -> Callable[[Chaos], None]:
  """Returns a fault: a signal to one process, after which all of them end."""

  def strike(chaos: Chaos) -> None:
    chaos.victim().send_signal(number)
    chaos.wait()

  return strike


def _pause(chaos: Chaos) -> None:
  """Stops the run for a moment, as a machine does that has no time for it."""
  _stop(chaos, chaos.processes, chaos.random.uniform(0.5, 3))


def _slow_host(chaos: Chaos) -> None:
  """Stops one process for longer, while the others wait for it."""
  _stop(chaos, [chaos.victim()], chaos.random.uniform(3, 10))


def _stop(
  chaos: Chaos, processes: Sequence[subprocess.Popen], seconds: float
) -> None:
  for process in processes:
    process.send_signal(signal.SIGSTOP)
  time.sleep(seconds)
  for process in processes:
    process.send_signal(signal.SIGCONT)


def _clock_jump(chaos: Chaos) -> None:
  """Sets the clock of the run, for good, by up to a day."""
  new = chaos.clock.with_suffix('.new')
  new.write_text(f'{chaos.random.uniform(-86400, 86400):.3f}', 'ascii')
  os.replace(new, chaos.clock)


def _slow_retriever(chaos: Chaos) -> None:
  assert chaos.retriever is not None
  chaos.retriever.send_signal(signal.SIGSTOP)
  time.sleep(chaos.random.uniform(0.5, 5))
  chaos.retriever.send_signal(signal.SIGCONT)


def _outage(chaos: Chaos) -> None:
  """Kills the retriever, and starts it again a little later."""
  assert chaos.retriever is not None
  chaos.retriever.kill()
  chaos.retriever.wait()
  time.sleep(chaos.random.uniform(0.5, 5))
  chaos.start_retriever()


def _full_disk(chaos: Chaos) -> None:
  """Lets the run write no file beyond a few bytes, as if the disk were full."""
  struck = list(chaos.processes)
  _limit_files(struck, 1024)
  time.sleep(chaos.random.uniform(0.5, 4))
  _limit_files(struck, None)


def _limit_files(
  processes: Sequence[subprocess.Popen], size: int | None
) -> None:
  """Sets the largest file that processes can write; None: any."""
  for process in processes:
    with contextlib.suppress(ProcessLookupError):
      _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
      limit = hard if size is None else size
      resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, hard))


def _corrupt(chaos: Chaos) -> None:
  """Kills the run and damages its newest checkpoint, unless it is the only."""
  _send(signal.SIGKILL)(chaos)
  steps = sorted(run_differences.steps(chaos.workdir))
  if len(steps) < 2:
    return
  newest = chaos.workdir / 'checkpoints' / str(steps[-1])
  files = [p for p in sorted(newest.rglob('*')) if p.is_file()]
  files = [path for path in files if path.stat().st_size]
  path = chaos.random.choice(files)
  data = bytearray(path.read_bytes())
  if chaos.random.random() < 0.5:
    data = data[: len(data) // 2]
  else:
    place = chaos.random.randrange(len(data))
    data[place] ^= 1 << chaos.random.randrange(8)
  path.write_bytes(data)


FAULTS: Mapping[str, Callable[[Chaos], None]] = {
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


def run(chaos: Chaos, *, faults: int, pace: float, minutes: float) -> int:
  """Trains under faults; returns the number of steps.

  Args:
    chaos: strikes the faults.
    faults: how many shall strike.
    pace: the mean number of seconds between two of them.
    minutes: after this time no more strike.

  Raises:
    Failed: see `Chaos.wait`.
  """
  end, num_steps = time.monotonic() + 60 * minutes, _BLOCK
  while True:
    if not chaos.processes:
      chaos.start(chaos.workdir, num_steps)
    is_over = chaos.struck.total() >= faults or time.monotonic() > end
    code = chaos.wait(None if is_over else chaos.random.uniform(0, 2 * pace))
    if code == 0 and is_over:
      return num_steps
    if code == 0:
      num_steps += _BLOCK
    elif code is None:
      chaos.strike()
      print(f'{chaos.struck.total()} faults have struck', flush=True)


def main(argv: Sequence[str]) -> int:
  """Strikes a run with faults; returns the exit code."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--faults', type=int, default=100)
  parser.add_argument('--minutes', type=float, default=60.0)
  parser.add_argument('--pace', type=float, default=15.0, help='seconds')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--hosts', type=int, default=2)
  parser.add_argument('--folder', type=pathlib.Path, help='is kept')
  flags, overrides = parser.parse_known_args(argv)
  with contextlib.ExitStack() as stack:
    folder = flags.folder or pathlib.Path(
      stack.enter_context(tempfile.TemporaryDirectory())
    )
    folder.mkdir(parents=True, exist_ok=True)
    chaos = Chaos(folder, flags.seed, hosts=flags.hosts, overrides=overrides)
    stack.callback(chaos.close)
    chaos.start_retriever()
    began = time.monotonic()
    try:
      num_steps = run(
        chaos, faults=flags.faults, pace=flags.pace, minutes=flags.minutes
      )
      minutes = (time.monotonic() - began) / 60
      starts, undisturbed = chaos.starts, folder / 'undisturbed'
      chaos.start(undisturbed, num_steps)
      if (code := chaos.wait()) != 0:
        raise Failed(f'the undisturbed run ended with exit code {code}')
    except Failed as failure:
      print(failure)
      return 1
    found = list(
      run_differences.differences(
        chaos.workdir, undisturbed, may_lack=chaos.struck['full disk'] > 0
      )
    )
    last = run_differences.last_line(chaos.workdir)
  print('\n'.join(f'{name}: {n}' for name, n in chaos.struck.items()))
  print(
    f'{chaos.struck.total()} faults in {minutes:.1f} minutes, {starts} starts, '
    f'{num_steps} steps, {last["goodput/lost_steps"]:.0f} lost and made again, '
    f'goodput {last["goodput/fraction"]:.2f}'
  )
  print('\n'.join(f'DIFFERS  {line}' for line in found) or 'equal, bit for bit')
  return 1 if found else 0


if __name__ == '__main__':
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  sys.exit(main(sys.argv[1:]))
