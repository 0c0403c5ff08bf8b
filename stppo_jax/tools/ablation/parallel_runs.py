"""Runs commands side by side on this machine, each on cores of its own."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

from stppo_jax import exits
from stppo_jax import interruption
from stppo_jax.workdir import heartbeat
from stppo_jax.workdir import lock

_POLL = 0.2  # seconds between two checks for ended commands


class Orphan:
  """A run that goes on although the process that started it is gone.

  The class has the methods of `subprocess.Popen` that `run` calls.

  Args:
    folder: the folder of the run.
    pid: the id of the run's process.
  """

  def __init__(self, folder: pathlib.Path, pid: int):
    self._folder, self.pid = folder, pid

  @classmethod
  def find(cls, folder: pathlib.Path) -> 'Orphan | None':
    """Returns a folder's run if a process of this host makes it, else None."""
    holder, is_alive = lock.holder(folder) or (None, False)
    return cls(folder, holder.pid) if holder and is_alive else None

  def poll(self) -> int | None:
    """Returns the exit code of the run, or None while the run goes on.

    The code is 75 if the run has ended without recording an exit code.
    """
    if self.find(self._folder) is not None:
      return None
    beat = heartbeat.read(self._folder)
    code = beat.exit_code if beat else None
    return exits.TRY_AGAIN if code is None else code

  def send_signal(self, number: int) -> None:
    """Sends a signal to the process of the run if the run still goes on."""
    if self.find(self._folder) is not None:
      os.kill(self.pid, number)


Words = Sequence[str | pathlib.Path]
Process = subprocess.Popen | Orphan


def run(
  commands: Mapping[str, Words | Orphan],
  *,
  jobs: int,
  compiled: pathlib.Path | None = None,
  logs: pathlib.Path | None = None,
  on_end: Callable[[str, int], None] = lambda name, exit_code: None,
) -> int:
  """Runs commands in their order and prints when each starts and ends.

  When this process gets its first SIGINT, SIGTERM or SIGHUP, it sends SIGTERM
  once to each running command, so that the command can save and end. It then
  starts no more commands.

  Args:
    commands: maps the name of a run to the words of its command, or to an
      `Orphan` if the run is already being made. Orphans come first, and each
      counts as one of the commands that run at once.
    jobs: the number of commands that run at once.
    compiled: the folder of the compilation cache of all commands. The variable
      JAX_COMPILATION_CACHE_DIR takes precedence if it is set.
    logs: the folder of the logs. The output of each command is appended to the
      file NAME.log. None discards the standard output of the commands.
    on_end: called with the name and the exit code of each command that ends.

  Returns:
    The exit code for the signal if this process got one, or else the largest
    exit code of the commands.
  """
  jobs = max(min(jobs, len(commands)), 1)
  cores = sorted(os.sched_getaffinity(0))
  each = max(len(cores) // jobs, 1)
  is_new = lambda item: not isinstance(item[1], Orphan)
  # Orphans are already running, so they come before the commands to start.
  waiting, worst = sorted(commands.items(), key=is_new), 0
  # launch/run.sh starts the Python interpreter that PYTHON names.
  environment = {'PYTHON': sys.executable, **os.environ}
  if compiled is not None:
    environment.setdefault(
      'JAX_COMPILATION_CACHE_DIR', str(compiled.absolute())
    )
  running: dict[int, tuple[str, Process]] = {}
  are_told = False
  with interruption.Interruption() as interrupt:
    interrupt.outlook = 'the runs save and end'
    try:
      while running or (waiting and interrupt.exit_code is None):
        for place in range(jobs):
          if place in running or not waiting or interrupt.exit_code is not None:
            continue
          name, words = waiting.pop(0)
          if isinstance(words, Orphan):
            process: Process = words
            print(f'{name}: already running, process {process.pid}', flush=True)
          else:
            print(f'{name}: starts', flush=True)
            log = logs / f'{name}.log' if logs else None
            process = _start(words, environment, log)
          running[place] = name, process
          # Each job gets cores of its own, because runs on shared cores would
          # wait for each other's threads.
          first = place * each % len(cores)
          _pin(process.pid, cores[first : first + each])
        # Each command has a session of its own, so Ctrl-C in the terminal
        # reaches only this process. This process passes the signal on once.
        if interrupt.exit_code is not None and not are_told:
          are_told = True
          _terminate(running)
        for place, (name, process) in list(running.items()):
          if (code := process.poll()) is not None:
            del running[place]
            # The exit code of a process that a signal has killed is negative.
            exit_code = abs(code)
            worst = max(worst, exit_code)
            ended = f'{name}: ended with exit code {code}'
            if code and logs:
              ended += f', see {logs / name}.log'
            print(ended, flush=True)
            on_end(name, exit_code)
        time.sleep(_POLL)
    # Commands in sessions of their own would outlive this process. They are
    # ended, because nothing would watch their runs.
    except BaseException:
      if not are_told:
        _terminate(running)
      raise
    return worst if interrupt.exit_code is None else interrupt.exit_code


def _start(
  words: Sequence[str | pathlib.Path],
  environment: Mapping[str, str],
  log: pathlib.Path | None,
) -> subprocess.Popen:
  """Starts a command in its own session, which the terminal cannot signal."""
  with open(log or os.devnull, 'ab') as output:
    return subprocess.Popen(
      words,
      env=environment,
      stdout=output,
      stderr=subprocess.STDOUT if log else None,
      start_new_session=True,
    )


def _pin(pid: int, cores: Sequence[int]) -> None:
  """Moves all threads of a process to the given cores."""
  # Cores are assigned to threads. A new thread inherits the cores, but threads
  # that already exist must be moved one by one.
  with contextlib.suppress(OSError):  # the process or a thread has ended
    for thread in os.listdir(f'/proc/{pid}/task'):
      os.sched_setaffinity(int(thread), cores)


def _terminate(running: Mapping[int, tuple[str, Process]]) -> None:
  """Sends SIGTERM to all running processes."""
  for _, process in running.values():
    process.send_signal(signal.SIGTERM)
