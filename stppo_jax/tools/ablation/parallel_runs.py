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

_POLL = 0.2  # seconds


class Orphan:
  """A run that goes on although the process that started it is gone.

  It has the part of `subprocess.Popen` that `run` needs.

  Args:
    folder: the folder of the run.
    pid: the number of its process.
  """

  def __init__(self, folder: pathlib.Path, pid: int):
    self._folder, self.pid = folder, pid

  @classmethod
  def find(cls, folder: pathlib.Path) -> 'Orphan | None':
    """Returns the run in a folder that a process of this host is making."""
    holder, is_alive = lock.holder(folder) or (None, False)
    return cls(folder, holder.pid) if holder and is_alive else None

  def poll(self) -> int | None:
    """Returns its exit code, 75 if it left none; None before its end."""
    if self.find(self._folder) is not None:
      return None
    beat = heartbeat.read(self._folder)
    code = beat.exit_code if beat else None
    return exits.TRY_AGAIN if code is None else code

  def send_signal(self, number: int) -> None:
    """Sends it a signal, unless it has ended."""
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

  The first signal to this process is passed on to the commands that run, once.
  They may save what they have; no other command is started then.

  Args:
    commands: name to the words of a command, or to what runs already, which
      comes first and counts among the jobs.
    jobs: the number of commands that run at once.
    compiled: the folder in which all commands keep compiled programs, unless
      JAX_COMPILATION_CACHE_DIR names one.
    logs: the folder to which the output of each command is appended, in a file
      of its name; None drops the output.
    on_end: called with the name and the exit code of a command that has ended.

  Returns:
    The exit code of the signal, or else the largest one of the commands.
  """
  jobs = max(min(jobs, len(commands)), 1)
  cores = sorted(os.sched_getaffinity(0))
  each = max(len(cores) // jobs, 1)
  is_new = lambda item: not isinstance(item[1], Orphan)
  # Runs that go on already use their cores, so they take their places first.
  waiting, worst = sorted(commands.items(), key=is_new), 0
  # run.sh starts the Python that PYTHON names.
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
            print(f'{name}: runs already, process {process.pid}', flush=True)
          else:
            print(f'{name}: starts', flush=True)
            log = logs / f'{name}.log' if logs else None
            process = _start(words, environment, log)
          running[place] = name, process
          # Runs that shared cores would wait for each other's threads.
          first = place * each % len(cores)
          _pin(process.pid, cores[first : first + each])
        # Commands have sessions of their own, so that Ctrl-C in the terminal
        # reaches only this process: they hear of it once, from here.
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
    # Sessions of their own would outlive this process, and their runs would go
    # on without anyone who knows of them.
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
  """Starts a command in a session where only this process signals to it."""
  with open(log or os.devnull, 'ab') as output:
    return subprocess.Popen(
      words,
      env=environment,
      stdout=output,
      stderr=subprocess.STDOUT if log else None,
      start_new_session=True,
    )


def _pin(pid: int, cores: Sequence[int]) -> None:
  """Moves all threads of a process to these cores."""
  # Cores belong to threads. New threads inherit them, but those that a process
  # has already must be moved one by one.
  with contextlib.suppress(OSError):  # it, or one of its threads, has ended
    for thread in os.listdir(f'/proc/{pid}/task'):
      os.sched_setaffinity(int(thread), cores)


def _terminate(running: Mapping[int, tuple[str, Process]]) -> None:
  """Sends SIGTERM to all processes."""
  for _, process in running.values():
    process.send_signal(signal.SIGTERM)
