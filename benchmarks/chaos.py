"""Strikes a run with faults until many have struck, and compares its result.

    python -m benchmarks.chaos
    python -m benchmarks.chaos --faults=10 --seed=3 --hosts=1 --folder=DIR

A supervisor trains a small quickstart as two processes (`--hosts`) that ask a
retrieval server in a third process. The faults of `benchmarks.faults` strike,
each as often as the others, in an order and at moments that follow from the
seed. Some strike while the run starts, the others after it has made a step. A
fault counts if its effect was seen; otherwise it is tried again. Whenever the
run has ended, the same command starts it again. When enough faults have struck,
or `--minutes` are over, the run goes on to its end. Then an undisturbed run of
the same length is made. In both runs these must be equal, bit for bit:

- the exported weights, and the fingerprints of the last checkpoint;
- every number of metrics.jsonl except times and counts of the faults
  themselves, and every dialogue.

While a disk is full, lines of metrics and dialogues may be lost, as documented.
In that case only the lines that both runs have are compared. The exit code is 1
if anything differs, if a process ends with a code that no fault explains, if a
process waits for a process that has ended, if the run makes no step in ten
minutes or in twenty starts, or if fewer faults have struck than were asked for.
The folder is kept if the exit code is 1.
"""

import argparse
import collections
from collections.abc import Iterator, Sequence
import pathlib
import random
import shutil
import sys
import tempfile
import time
from typing import NamedTuple

from benchmarks import disturbed_run
from benchmarks import faults as faults_lib
from benchmarks import run_differences
from benchmarks import same_numbers

_EARLY = 0.25  # the share of the strikes that come while the run starts
_TRIES = 5  # how often a strike without an effect is tried
# The assumed seconds of a start, until a start has been measured.
_START = 30.0
_POLL = 0.2


class Strike(NamedTuple):
  """A fault, and when it strikes.

  Attributes:
    name: a key of `FAULTS`.
    early: the moment of a strike during the start of a run, as a share of the
      time that a start takes; None if the strike comes after a step.
    seconds: the time from the fault before to this strike, or, if the run was
      started in between, from its first step to this strike.
    seed: the seed of the fault's random details.
  """

  name: str
  early: float | None
  seconds: float
  seed: int


def schedule(seed: int, pace: float) -> Iterator[Strike]:
  """Yields strikes: all faults, in random order, again and again.

  Args:
    seed: the seed of the order, the moments and the details of the faults.
    pace: the mean number of seconds between two strikes.
  """
  draws = random.Random(seed)
  while True:
    names = sorted(faults_lib.FAULTS)
    draws.shuffle(names)
    for name in names:
      is_early, moment = draws.random() < _EARLY, draws.random()
      seconds = draws.uniform(0, 2 * pace)
      number = draws.randrange(2**32)
      yield Strike(name, moment if is_early else None, seconds, number)


class Chaos:
  """Strikes a run with faults, and starts it again whenever it has ended.

  Args:
    run: the run.
    block: the number of steps of the run at first. If the run has ended and
      faults are left, the run becomes longer by this number.

  Attributes:
    num_steps: the present length of the run, in steps.
    struck: how often each fault has struck.
    early: the number of faults that have struck while the run started.
    missed: how often each fault was tried without an effect.
  """

  def __init__(self, run: disturbed_run.DisturbedRun, *, block: int):
    self.num_steps = block
    self.struck: collections.Counter[str] = collections.Counter()
    self.missed: collections.Counter[str] = collections.Counter()
    self.early = 0
    self._run, self._block = run, block
    self._began = time.monotonic()
    self._start_seconds = _START

  def strike_all(
    self, strikes: Iterator[Strike], *, count: int, until: float
  ) -> None:
    """Strikes `count` times, or until the time `until`; then lets the run end.

    Raises:
      Failed: if the run has broken a promise.
    """
    while self.struck.total() < count and time.monotonic() < until:
      strike = next(strikes)
      details = random.Random(strike.seed)
      for _ in range(_TRIES):
        if self._strike(strike, details):
          break
        self.missed[strike.name] += 1
    while not self._run.processes or self._run.wait() != 0:
      self._run.start(self.num_steps)

  def _strike(self, strike: Strike, details: random.Random) -> bool:
    """Waits for the moment of a strike; returns whether it has struck."""
    run = self._run
    is_early = strike.early is not None and not run.processes
    if is_early:
      run.start(self.num_steps)
      assert strike.early is not None
      self._pass(strike.early * self._start_seconds)
      is_early = not run.has_made_step
    else:
      self._reach_step()
      self._pass(strike.seconds)
    if not run.goes_on:
      return False
    beat = run.beat
    moment = f'step {beat.step + 1}, {beat.phase}' if beat else 'start'
    has_struck = faults_lib.FAULTS[strike.name](run, details)
    self.struck[strike.name] += has_struck
    self.early += has_struck and is_early
    minutes = (time.monotonic() - self._began) / 60
    result = f'{self.struck.total()}' if has_struck else 'missed'
    print(f'{minutes:6.1f} min  {result}: {strike.name} ({moment})', flush=True)
    return has_struck

  def _reach_step(self) -> None:
    """Waits until the run has made a step since its last start."""
    run, is_new = self._run, False
    while not run.processes or not run.has_made_step:
      is_new = True
      if not run.processes:
        run.start(self.num_steps)
      self._pass(_POLL)
    if is_new:
      self._start_seconds = time.monotonic() - run.started

  def _pass(self, seconds: float) -> None:
    """Waits for some seconds, or until the run has ended.

    If the run has made all its steps, its next start has more steps.
    """
    if self._run.wait(seconds) == 0:
      self.num_steps += self._block


def main(argv: Sequence[str]) -> int:
  """Strikes a run with faults; returns the exit code."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--faults', type=int, default=100)
  parser.add_argument(
    '--minutes',
    type=float,
    default=60.0,
    help='no fault is injected after them',
  )
  parser.add_argument(
    '--pace', type=float, default=4.0, help='mean seconds between two faults'
  )
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--hosts', type=int, default=2)
  parser.add_argument(
    '--steps',
    type=int,
    default=50,
    help='length of the run, which becomes so much longer while faults are '
    f'left; a multiple of {disturbed_run.EVALUATES}',
  )
  parser.add_argument(
    '--folder', type=pathlib.Path, help='where the runs are, and are kept'
  )
  flags, overrides = parser.parse_known_args(argv)
  if flags.steps % disturbed_run.EVALUATES:
    # A run always evaluates its last step, so a disturbed run that becomes
    # longer has also evaluated the last step of each shorter length. The
    # undisturbed run has the final length from the start, and evaluates such a
    # step only if the step is a multiple of EVALUATES.
    parser.error(
      f'--steps={flags.steps}: must be a multiple of {disturbed_run.EVALUATES}'
    )
  folder = flags.folder or pathlib.Path(tempfile.mkdtemp(prefix='chaos-'))
  folder.mkdir(parents=True, exist_ok=True)
  run = disturbed_run.DisturbedRun(
    folder, hosts=flags.hosts, overrides=overrides
  )
  try:
    code = _compare(run, folder, flags)
  except disturbed_run.Failed as failure:
    print(failure)
    code = 1
  finally:
    run.close()
  if code:
    print(f'the runs are kept in {folder}')
  elif flags.folder is None:
    shutil.rmtree(folder)
  return code


def _compare(
  run: disturbed_run.DisturbedRun,
  folder: pathlib.Path,
  flags: argparse.Namespace,
) -> int:
  """Strikes a run, makes an undisturbed run, and compares the two runs.

  Returns the exit code.
  """
  began = time.monotonic()
  run.start_retriever()
  chaos = Chaos(run, block=flags.steps)
  chaos.strike_all(
    schedule(flags.seed, flags.pace),
    count=flags.faults,
    until=began + 60 * flags.minutes,
  )
  minutes = (time.monotonic() - began) / 60
  starts, undisturbed = run.starts, folder / 'undisturbed'
  run.clock.unlink(missing_ok=True)
  run.start(chaos.num_steps, workdir=undisturbed)
  if (code := run.wait()) != 0:
    raise run.failed(f'the undisturbed run ended with exit code {code}')
  may_lack = chaos.struck['full disk'] + chaos.missed['full disk'] > 0
  found = list(
    run_differences.differences(run.workdir, undisturbed, may_lack=may_lack)
  )
  last = same_numbers.json_lines(run.workdir / 'metrics.jsonl')[-1]
  for name in faults_lib.FAULTS:
    print(f'{name}: {chaos.struck[name]}, missed {chaos.missed[name]}')
  count = chaos.struck.total()
  print(
    f'{count} faults in {minutes:.1f} minutes, {chaos.early} of them while the '
    f'run started; {starts} starts, {chaos.num_steps} steps, '
    f'{last["goodput/lost_steps"]:.0f} lost and made again, '
    f'goodput {last["goodput/fraction"]:.2f}'
  )
  if count < flags.faults:
    found.append(f'only {count} of {flags.faults} faults have struck')
  print('\n'.join(f'DIFFERS  {line}' for line in found) or 'equal, bit for bit')
  return 1 if found else 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
