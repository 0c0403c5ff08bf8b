"""Runs commands side by side on this machine, each on cores of its own."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import os
import pathlib
import signal
import subprocess
import sys
import time

from stppo_jax import interruption

_POLL = 0.2  # seconds


def run(
  commands: Mapping[str, Sequence[str | pathlib.Path]],
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
    commands: name to the words of a command.
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
  waiting, worst = list(commands.items()), 0
  # run.sh starts the Python that PYTHON names.
  environment = {'PYTHON': sys.executable, **os.environ}
  if compiled is not None:
    environment.setdefault(
      'JAX_COMPILATION_CACHE_DIR', str(compiled.absolute())
    )
  running: dict[int, tuple[str, subprocess.Popen]] = {}
  are_told = False
  with interruption.Interruption() as interrupt:
    interrupt.outlook = 'the runs save and end'
    try:
      while running or (waiting and interrupt.exit_code is None):
        for place in range(jobs):
          if place in running or not waiting or interrupt.exit_code is not None:
            continue
          name, words = waiting.pop(0)
          print(f'{name}: starts', flush=True)
          log = logs / f'{name}.log' if logs else None
          process = _start(words, environment, log)
          running[place] = name, process
          first = place * each % len(cores)
          os.sched_setaffinity(process.pid, cores[first : first + each])
        if interrupt.exit_code is not None and not are_told:
          are_told = True
          _terminate(running)
        for place, (name, process) in list(running.items()):
          if process.poll() is not None:
            del running[place]
            # That of a process which a signal has killed is negative.
            exit_code = abs(process.returncode)
            worst = max(worst, exit_code)
            print(
              f'{name}: ended with exit code {process.returncode}', flush=True
            )
            on_end(name, exit_code)
        time.sleep(_POLL)
    except BaseException:
      if not are_told:
        _terminate(running)
      raise
    return worst if interrupt.exit_code is None else interrupt.exit_code


def own_copy(flags: Sequence[str], name: str) -> list[str]:
  """Returns a flag that gives one of several runs a copy of its own.

  Args:
    flags: the flags of all of them.
    name: the name of the run, which is added to `writer.copy_to`; [] is
      returned if the flags do not set it.
  """
  start = '--config.writer.copy_to='
  given = [flag for flag in flags if flag.startswith(start) and flag != start]
  return [f'{given[-1].rstrip("/")}/{name}'] if given else []


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


def _terminate(running: Mapping[int, tuple[str, subprocess.Popen]]) -> None:
  """Sends SIGTERM to all processes."""
  for _, process in running.values():
    process.send_signal(signal.SIGTERM)
