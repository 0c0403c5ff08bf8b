"""Measures how long the quickstart takes to end after SIGTERM, phase by phase.

    python -m benchmarks.exit_time
    python -m benchmarks.exit_time --only=first_update,first_save --limit=5

For each of `MOMENTS`, a run of its own starts in a new folder, compiles all its
programs, and sends itself SIGTERM at that moment. The time is counted from the
signal until the parent process sees that the run has ended. It is compared with
the limit. The runs also get this limit as `preemption.grace`, so a run does not
begin a save that would take longer. A run must end with exit code 75 and
without a traceback, and if it had done a step, this step must be saved.

The exit code is 1 if a run ends otherwise, or takes longer than the limit. Run
this on an idle machine, because the runs share their cores with all other work.
The second column is the CPU time of all threads of the process from the signal
on. It depends less on other work: on a busy machine it shows roughly how long
an idle machine would take.
"""

import argparse
from collections.abc import Mapping, Sequence
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import NamedTuple

import stppo_jax

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_FLAGS = (
  '--config=configs/quickstart.py:st_ppo',
  '--config.num_steps=6',  # the second save comes before the end of the run
  '--config.evaluate.every=2',
  '--config.checkpoint.every=2',
)
_TRY_AGAIN = 75
_SENT = 'signal-sent'  # the file with wall and CPU time when the signal is sent


class Moment(NamedTuple):
  """The moment of a run at which the signal is sent.

  Attributes:
    kind: what happens at the moment: 'import', 'file' or 'phase'.
    name: the module that is imported, the file that is renamed to this name, or
      the phase that begins.
    number: which occurrence is meant, counted from 1.
    delay: the seconds from the occurrence to the signal.
  """

  kind: str
  name: str
  number: int = 1
  delay: float = 0.0


# The first occurrence of a phase compiles its programs.
MOMENTS: Mapping[str, Moment] = {
  'first_imports': Moment('import', 'numpy'),
  'imports': Moment('import', 'jax'),
  'late_imports': Moment('import', 'orbax.checkpoint'),
  'building': Moment('file', 'config.json', delay=0.3),
  'first_evaluation': Moment('phase', 'evaluate', delay=0.5),
  'first_compilation': Moment('phase', 'evaluate', delay=2.0),
  'first_collection': Moment('phase', 'wait', delay=0.5),
  'first_annotation': Moment('phase', 'annotate', delay=0.3),
  'first_update': Moment('phase', 'update', delay=1.0),
  'collection': Moment('phase', 'wait', 2, 0.3),
  'annotation': Moment('phase', 'annotate', 2, 0.02),
  'update': Moment('phase', 'update', 2, 0.1),
  'evaluation': Moment('phase', 'evaluate', 2, 0.3),
  'first_save': Moment('phase', 'checkpoint', delay=0.05),
  'save': Moment('phase', 'checkpoint', 2, 0.02),
  'export': Moment('phase', 'export'),
}


class End(NamedTuple):
  """The end of a run.

  Attributes:
    seconds: the time from the signal to the end of the process; nan if the
      process got no signal.
    computed: the CPU seconds of all threads of the process in this time.
    exit_code: the exit code of the process.
    problem: what the run did wrong; '' if nothing.
  """

  seconds: float
  computed: float
  exit_code: int
  problem: str


def measure(name: str, folder: pathlib.Path, flags: Sequence[str] = ()) -> End:
  """Runs the quickstart until the signal of a moment ends it; returns the end.

  Args:
    name: a key of `MOMENTS`.
    folder: an empty folder.
    flags: further flags of `train`.
  """
  before = sum(os.times()[2:4])
  process = subprocess.Popen(
    [
      *(sys.executable, '-m', 'benchmarks.exit_time', '--child', name),
      *(str(folder), *_FLAGS, *flags),
    ],
    cwd=_ROOT,
    # Without the cache of compiled programs, no program of an earlier run is
    # used.
    env={k: x for k, x in os.environ.items() if 'COMPILATION_CACHE' not in k},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    errors='replace',
  )
  output, _ = process.communicate()
  ended = time.time(), sum(os.times()[2:4]) - before
  seconds = computed = float('nan')
  if (folder / _SENT).exists():
    sent = map(float, (folder / _SENT).read_text('ascii').split())
    seconds, computed = (end - then for end, then in zip(ended, sent))
  # An export, and with it the run, may be finished before the signal acts.
  is_done = process.returncode == 0 and '\ndone. ' in output
  expected = 0 if name == 'export' and is_done else _TRY_AGAIN
  problem = ''
  if process.returncode != expected or 'Traceback' in output:
    problem = f'exit code {process.returncode}: {output[-2000:]}'
  elif 'interrupted' not in output and 'SIGTERM: ending' not in output:
    problem = f'it does not say that it was interrupted: {output[-2000:]}'
  elif 'not saved' in output:
    problem = output[output.index('interrupted') :].strip()
  return End(seconds, computed, process.returncode, problem)


def _run(name: str, folder: pathlib.Path, argv: Sequence[str]) -> None:
  """Trains in this process, which sends itself the signal of a moment."""
  moment, happened = MOMENTS[name], 0

  def send() -> None:
    now = time.time(), sum(os.times()[:2])
    (folder / _SENT).write_text(' '.join(map(repr, now)), 'ascii')
    os.kill(os.getpid(), signal.SIGTERM)

  def count() -> None:
    nonlocal happened
    happened += 1
    if happened == moment.number:
      if moment.delay:
        timer = threading.Timer(moment.delay, send)
        timer.daemon = True
        timer.start()
      else:
        send()

  def audit(event: str, arguments: tuple) -> None:
    is_import = event == 'import' and moment.kind == 'import'
    if is_import and arguments[0] == moment.name:
      count()
    if event == 'os.rename' and moment.kind == 'file':
      if os.path.basename(str(arguments[1])) == moment.name:
        count()

  sys.addaudithook(audit)
  if moment.kind == 'phase':
    from stppo_jax.workdir import run_monitor

    begin = run_monitor.Watch.begin_phase

    def begin_phase(self: run_monitor.Watch, phase: str) -> None:
      begin(self, phase)
      if phase == moment.name:
        count()

    run_monitor.Watch.begin_phase = begin_phase
  sys.argv[1:] = ['train', f'--workdir={folder / "run"}', *argv]
  stppo_jax.console()


def main(argv: Sequence[str]) -> int:
  """Measures the moments that --only names; returns the exit code."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--only', default=','.join(MOMENTS))
  parser.add_argument('--limit', type=float, default=5.0, help='seconds')
  flags, overrides = parser.parse_known_args(argv)
  names = flags.only.split(',')
  unknown = [name for name in names if name not in MOMENTS]
  if unknown:
    parser.error(f'--only={unknown[0]}: must be some of {", ".join(MOMENTS)}')
  worst = 0.0
  problems = []
  for name in names:
    with tempfile.TemporaryDirectory() as folder:
      grace = f'--config.preemption.grace={flags.limit}'
      end = measure(name, pathlib.Path(folder), [grace, *overrides])
    times = f'{end.seconds:6.2f} s  {end.computed:6.2f} s computed'
    print(f'{name:18} {times}', flush=True)
    if end.problem or not end.seconds <= flags.limit:
      problems.append(f'{name}: {end.seconds:.2f} s; {end.problem}')
    worst = max(worst, end.seconds)
  print(
    f'longest: {worst:.2f} s; load {os.getloadavg()[0]:.1f} on '
    f'{os.cpu_count()} cores'
  )
  print('\n'.join(f'WRONG  {line}' for line in problems) or 'all in time')
  return 1 if problems else 0


if __name__ == '__main__':
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  if sys.argv[1:2] == ['--child']:
    _run(sys.argv[2], pathlib.Path(sys.argv[3]), sys.argv[4:])
  else:
    sys.exit(main(sys.argv[1:]))
