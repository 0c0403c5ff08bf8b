"""The run that `benchmarks.chaos` strikes, and its retrieval server."""

import collections
from collections.abc import Iterator, Sequence
import errno
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

from benchmarks import run_differences
from stppo_jax.workdir import heartbeat

ROOT = pathlib.Path(__file__).resolve().parent.parent
EVALUATES = 5  # steps from one evaluation to the next
_KEPT_LINES = 60  # the last lines of output that are printed if the run fails
_TOGETHER = 120.0  # most seconds from the first end of a process to the last
_HANGS = 600.0  # seconds in which a run must make a step, or end
_STARTS = 20  # starts in which a run must make a step
_START_TIMEOUT = 60.0  # seconds that processes wait for each other at a start
_POLL = 0.05
_SMALL = {
  'rollout.trajectories_per_step': 16,
  'updates.minibatch_size': 8,
  # These keys make the compiled programs fewer and smaller. Only the first host
  # writes to jax's cache of compiled programs, so all other hosts compile the
  # programs again at each start.
  'model.scan_unroll': 1,
  'writer.token_details': 0,
  'evaluate.every': EVALUATES,
  'evaluate.num_questions': 16,
  'checkpoint.every': 1,
  'checkpoint.keep': 3,
  'writer.samples': 0,
  # No trajectory may fail, because it would be missing in the batch.
  'rollout.min_valid_fraction': 1.0,
}
_EXPECTED = (0, 75, 130)  # the exit codes with which a process may end
# The output is searched for this error of a file that cannot grow.
_FULL = os.strerror(errno.EFBIG)


class Failed(Exception):
  """Raised if the run has broken a promise; the message says which one."""


class DisturbedRun:
  """A run with its retrieval server, which faults may strike.

  Args:
    folder: the folder in which the folder of the run is made.
    hosts: the number of processes that train together.
    overrides: further flags of `train`.

  Attributes:
    workdir: the run's folder.
    clock: the file that shifts the clock of the run, see `jumping_clock`.
    port: the port of the retrieval server on this machine.
    processes: the processes of the run, while it goes on.
    codes: the exit code of each process at the last end of the run, by process
      id.
    retriever: the process of the retrieval server.
    starts: how often the run was started.
    started: the time of the last start, by the monotonic clock.
    full: the number of lines of output that report a file that cannot grow.
  """

  def __init__(
    self, folder: pathlib.Path, *, hosts: int, overrides: Sequence[str] = ()
  ):
    self.workdir = folder / 'disturbed'
    self.clock = folder / 'clock'
    self.port = free_port()
    self.processes: list[subprocess.Popen] = []
    self.codes: dict[int, int] = {}
    self.retriever: subprocess.Popen | None = None
    self.starts = self.full = 0
    self.started = 0.0
    self._hosts, self._overrides = hosts, overrides
    self._num_steps = 0
    self._saved = -1  # the newest saved step when the run was started
    self._best = (-1, 0)  # the newest saved step, and the starts since then
    self._output: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
    self._current = self.workdir
    self._sent: dict[int, int] = {}  # process id -> the last signal it got
    self._counting = threading.Lock()  # several threads change `full`
    self._progressed = (0, math.inf)  # the heartbeat's step, and its time

  def start(
    self, num_steps: int, *, workdir: pathlib.Path | None = None
  ) -> None:
    """Starts the run.

    Args:
      num_steps: the number of steps of the run.
      workdir: the folder of another run of the same config, which is started
        instead; None for this run.

    Raises:
      Failed: if the run has saved no further step in the last `_STARTS` starts.
    """
    self.starts += 1
    self._num_steps, self._current = num_steps, workdir or self.workdir
    self.started, self._saved = time.monotonic(), self._newest()
    self._progressed = (-1, self.started)
    best, starts = self._best
    self._best = (best, starts + 1) if self._saved <= best else (self._saved, 0)
    if self._best[1] > _STARTS:
      raise self.failed(f'no step in {_STARTS} starts')
    env = dict(os.environ, JAX_PLATFORMS='cpu')
    for command in self._commands():
      process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors='replace',
      )
      self.processes.append(process)
      threading.Thread(target=self._read, args=(process,), daemon=True).start()

  def start_again(self) -> None:
    """Starts the run with the same command as the last time."""
    self.start(self._num_steps, workdir=self._current)

  def _commands(self) -> Iterator[list[str]]:
    """Yields the command of each process."""
    values = _SMALL | {
      'num_steps': self._num_steps,
      'retrieval.url': f'http://127.0.0.1:{self.port}',
    }
    command = [
      *(sys.executable, '-m', 'benchmarks.jumping_clock', str(self.clock)),
      *('train', '--config=configs/quickstart.py:st_ppo'),
      f'--workdir={self._current}',
      *(f'--config.{key}={value}' for key, value in values.items()),
      *self._overrides,
    ]
    if self._hosts == 1:
      yield command
      return
    address = f'127.0.0.1:{free_port()}'
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
        f'--port={self.port}',
      ],
      cwd=ROOT,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )

  def _read(self, process: subprocess.Popen) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
      for line in lines:
        self._output.append(line)
        with self._counting:
          self.full += _FULL in line

  def send(self, process: subprocess.Popen, number: signal.Signals) -> None:
    """Sends a signal, and notes it as an explanation of the exit code."""
    self._sent[process.pid] = number
    process.send_signal(number)

  @property
  def beat(self) -> heartbeat.Beat | None:
    """The last heartbeat since this start; None before the first heartbeat."""
    beat = heartbeat.read(self._current)
    pids = [process.pid for process in self.processes]
    return beat if beat is not None and beat.pid in pids else None

  @property
  def has_made_step(self) -> bool:
    """Whether the run has saved a step since its last start."""
    return self._newest() > self._saved

  def _newest(self) -> int:
    """Returns the number of the newest saved step; -1 if there is none."""
    return max(run_differences.steps(self._current), default=-1)

  @property
  def goes_on(self) -> bool:
    """Whether all processes of the run still go on."""
    return bool(self.processes) and all(
      process.poll() is None for process in self.processes
    )

  def wait(self, seconds: float | None = None) -> int | None:
    """Returns the run's exit code; None if it still goes on after `seconds`.

    Raises:
      Failed: if nothing explains an exit code, a process goes on without the
        others, or the run makes no step.
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
          raise self.failed(f'a process goes on without the others: {codes}')
      elif end is not None and time.monotonic() > end:
        return None
      self._check_progress()
      time.sleep(_POLL)
    self.codes = {p.pid: p.returncode for p in self.processes}
    self.processes = []
    for pid, code in self.codes.items():
      # If a signal comes before Python handles signals, it kills the process,
      # and the exit code is the negative number of the signal.
      if code not in _EXPECTED and code != -self._sent.get(pid, 0):
        raise self.failed(f'exit code {code}')
    return next((code for code in codes if code), 0)

  def _check_progress(self) -> None:
    """Raises `Failed` if the run has made no step for too long."""
    beat, (step, since) = self.beat, self._progressed
    if beat is not None and beat.step != step:
      self._progressed = (beat.step, time.monotonic())
    elif time.monotonic() > since + _HANGS:
      raise self.failed(f'no step within {_HANGS:.0f} s')

  def failed(self, what: str) -> Failed:
    """Returns an error with the last lines of output."""
    return Failed(f'{what}:\n{"".join(self._output)}')

  def close(self) -> None:
    for process in (*self.processes, self.retriever):
      if process is not None and process.poll() is None:
        process.kill()
        process.wait()


def free_port() -> int:
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]
