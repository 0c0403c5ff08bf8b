"""Strikes a run with faults until many have struck, and compares its result.

    python -m benchmarks.chaos
    python -m benchmarks.chaos --faults=10 --seed=3 --folder=DIR

A supervisor trains the quickstart, made small, as a process that asks a
retrieval server in another process. At random moments, which follow from the
seed, one of `FAULTS` strikes. Whenever the run has ended, the same command
starts it again. When enough faults have struck, the run goes on to its end, and
an undisturbed run of the same length is made. These must be equal, bit for bit:

- the exported weights, and the fingerprints of the last checkpoint;
- every number of metrics.jsonl but the times, and every dialogue.

While a disk is full, lines of metrics and dialogues may be lost, as is
promised; then those that are there are compared. The exit code is 1 if anything
differs or if the run ends with a code that no fault explains.
"""

import argparse
import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import json
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
from typing import Any

from benchmarks import same_numbers

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_BLOCK = 10  # steps by which the run becomes longer while faults are left
_KEPT_LINES = 40  # of the run's output, printed if it fails
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
# Differences that a full disk explains.
_OF_THE_DISK = 'writer/sink_errors'


class Failed(Exception):
  """The run has broken a promise; the message says which."""


class Chaos:
  """A run, its retrieval server, and the faults that strike them.

  Args:
    folder: holds the folder of the run.
    seed: decides which faults strike, and when.
    overrides: further flags of `train`.

  Attributes:
    struck: how often each fault has struck.
    starts: how often the run was started.
  """

  def __init__(self, folder: pathlib.Path, seed: int, overrides: Sequence[str]):
    self.workdir = folder / 'disturbed'
    self.random = random.Random(seed)
    self.struck: collections.Counter = collections.Counter()
    self.starts = 0
    self._overrides = overrides
    with socket.socket() as probe:
      probe.bind(('127.0.0.1', 0))
      self._port = probe.getsockname()[1]
    self.process: subprocess.Popen | None = None
    self.retriever: subprocess.Popen | None = None
    self._output: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)

  def command(self, workdir: pathlib.Path, num_steps: int) -> list[str]:
    """Returns the command of a run of that length."""
    values = _SMALL | {
      'num_steps': num_steps,
      'retrieval.url': f'http://127.0.0.1:{self._port}',
    }
    flags = [f'--config.{key}={value}' for key, value in values.items()]
    return [
      *(sys.executable, '-m', 'stppo_jax', 'train'),
      *('--config=configs/quickstart.py:st_ppo', f'--workdir={workdir}'),
      *(*flags, *self._overrides),
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
    process = self.process = subprocess.Popen(
      self.command(workdir, num_steps),
      cwd=_ROOT,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      errors='replace',
    )

    def read():
      assert process.stdout is not None
      with process.stdout as lines:
        self._output.extend(lines)

    threading.Thread(target=read, daemon=True).start()

  def wait(self, seconds: float | None = None) -> int | None:
    """Returns the run's exit code; None if it goes on after some seconds.

    Raises:
      Failed: nothing explains this code.
    """
    assert self.process is not None
    try:
      code = self.process.wait(seconds)
    except subprocess.TimeoutExpired:
      return None
    self.process = None
    if code not in _EXPECTED:
      raise Failed(f'exit code {code}:\n{"".join(self._output)}')
    return code

  def strike(self) -> None:
    """Lets a fault strike, chosen at random."""
    name = self.random.choice(sorted(FAULTS))
    FAULTS[name](self)
    self.struck[name] += 1

  def close(self) -> None:
    for process in (self.process, self.retriever):
      if process is not None and process.poll() is None:
        process.kill()
        process.wait()


def _send(number: signal.Signals) -> Callable[[Chaos], None]:
  def strike(chaos: Chaos) -> None:
    assert chaos.process is not None
    chaos.process.send_signal(number)
    chaos.wait()

  return strike


def _pause(chaos: Chaos) -> None:
  """Stops the run for a moment, as a machine does that has no time for it."""
  assert chaos.process is not None
  chaos.process.send_signal(signal.SIGSTOP)
  time.sleep(chaos.random.uniform(0.5, 3))
  chaos.process.send_signal(signal.SIGCONT)


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
  assert chaos.process is not None
  pid = chaos.process.pid
  with contextlib.suppress(ProcessLookupError):
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1024, hard))
    time.sleep(chaos.random.uniform(0.5, 4))
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


def _corrupt(chaos: Chaos) -> None:
  """Kills the run and damages its newest checkpoint, unless it is the only."""
  _send(signal.SIGKILL)(chaos)
  steps = sorted(_steps(chaos.workdir))
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
    if chaos.process is None:
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


def differences(
  disturbed: pathlib.Path, undisturbed: pathlib.Path, *, may_lack: bool
) -> Iterator[str]:
  """Yields what differs between the folders of two runs.

  Args:
    disturbed, undisturbed: the folders.
    may_lack: whether the first may lack lines and dialogues.
  """
  name = 'policy/model.safetensors'
  if (disturbed / name).read_bytes() != (undisturbed / name).read_bytes():
    yield name
  if _fingerprints(disturbed) != _fingerprints(undisturbed):
    yield 'the last checkpoint'
  ours, theirs = _metrics(disturbed), _metrics(undisturbed)
  for step, line in theirs.items():
    if step not in ours:
      if not may_lack:
        yield f'metrics of step {step}: missing'
    elif ours[step] != line:
      names = [k for k in line | ours[step] if line.get(k) != ours[step].get(k)]
      yield f'metrics of step {step}: {", ".join(sorted(names)[:3])}'
  for path in sorted(undisturbed.glob('trajectories-*.jsonl')):
    ours_path = disturbed / path.name
    # All lines are written or, on a full disk, none.
    if not ours_path.is_file() or not ours_path.stat().st_size:
      if not may_lack:
        yield f'{path.name}: missing'
    elif ours_path.read_bytes() != path.read_bytes():
      yield path.name


def _metrics(workdir: pathlib.Path) -> dict[int, dict[str, Any]]:
  """Returns the numbers of each step that do not depend on the clock."""
  text = (workdir / 'metrics.jsonl').read_text('utf-8')
  lines = [json.loads(line) for line in text.splitlines()]
  left_out = (*same_numbers.TIMES, _OF_THE_DISK)
  return {
    line['step']: {k: x for k, x in line.items() if not k.startswith(left_out)}
    for line in lines
  }


def _steps(workdir: pathlib.Path) -> list[int]:
  folder = workdir / 'checkpoints'
  names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
  return [int(name) for name in names if name.isdecimal()]


def _fingerprints(workdir: pathlib.Path) -> dict[str, Any]:
  """Returns the fingerprint of each array of the last checkpoint."""
  step = max(_steps(workdir))
  path = workdir / 'checkpoints' / str(step) / 'manifest' / 'metadata'
  leaves = json.loads(path.read_text('utf-8'))['leaves']
  return {'step': step, **leaves}


def main(argv: Sequence[str]) -> int:
  """Strikes a run with faults; returns the exit code."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--faults', type=int, default=100)
  parser.add_argument('--minutes', type=float, default=60.0)
  parser.add_argument('--pace', type=float, default=15.0, help='seconds')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--folder', type=pathlib.Path, help='is kept')
  flags, overrides = parser.parse_known_args(argv)
  with contextlib.ExitStack() as stack:
    folder = flags.folder or pathlib.Path(
      stack.enter_context(tempfile.TemporaryDirectory())
    )
    chaos = Chaos(folder, flags.seed, overrides)
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
      differences(
        chaos.workdir, undisturbed, may_lack=chaos.struck['full disk'] > 0
      )
    )
    last = _last_line(chaos.workdir)
  print('\n'.join(f'{name}: {n}' for name, n in chaos.struck.items()))
  print(
    f'{chaos.struck.total()} faults in {minutes:.1f} minutes, {starts} starts, '
    f'{num_steps} steps, {last["goodput/lost_steps"]:.0f} lost and made again, '
    f'goodput {last["goodput/fraction"]:.2f}'
  )
  print('\n'.join(f'DIFFERS  {line}' for line in found) or 'equal, bit for bit')
  return 1 if found else 0


def _last_line(workdir: pathlib.Path) -> dict[str, Any]:
  text = (workdir / 'metrics.jsonl').read_text('utf-8')
  return json.loads(text.splitlines()[-1])


if __name__ == '__main__':
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  sys.exit(main(sys.argv[1:]))
