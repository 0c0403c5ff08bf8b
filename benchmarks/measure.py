"""Times cases in turn, and reports the times.

All cases of a comparison are timed in the same process, round by round: a round
times each case once, and the next round does so in the opposite order. So other
work of the machine affects all cases alike, and the quotient of two cases is
formed within a round.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import os
import platform
import time
from typing import Any, NamedTuple

import jax
import numpy as np

MIN_REPEATS = 7
_WARM_CALLS = 2
# A sample is so long that neither the resolution of the clock nor threads of
# another library that still spin after a call affect its time much.
SAMPLE_SECONDS = 0.05
# Samples cannot be trusted if upper quartile / least exceeds this number.
_DISTURBED = 1.5
_FLAGS = ('XLA_FLAGS', 'OMP_NUM_THREADS', 'GLIBC_TUNABLES', 'JAX_PLATFORMS')


class Case(NamedTuple):
  """A function to be timed.

  Attributes:
    run: the function that is timed. It must not return before its work is done.
    prepare: makes the argument of `run` for each call, and is not timed. None =
      `run` has no argument, and a sample calls it repeatedly for about 50 ms.
  """

  run: Callable[..., Any]
  prepare: Callable[[], Any] | None = None


def single(call: Callable[[], Any]) -> Case:
  """Returns a case in which one call of `call` is a whole sample."""
  return Case(lambda _: call(), lambda: None)


def once(case: Case) -> tuple[float, Any]:
  """Returns the seconds of one call, and its result."""
  arguments = () if case.prepare is None else (case.prepare(),)
  begin = time.perf_counter()
  result = case.run(*arguments)
  return time.perf_counter() - begin, result


def _sample(case: Case, calls: int) -> float:
  """Returns the seconds per call in one sample of a case."""
  if case.prepare is not None:
    return once(case)[0]
  case.run()  # so that the processor's caches have the data of this case
  begin = time.perf_counter()
  for _ in range(calls):
    case.run()
  return (time.perf_counter() - begin) / calls


def interleave(
  cases: Mapping[str, Case], *, repeats: int
) -> dict[str, np.ndarray]:
  """Samples all cases in turn; returns the seconds per call of each sample.

  Args:
    cases: the cases by name.
    repeats: the number of rounds, and so of samples of each case.
  """
  calls = {}
  for name, case in cases.items():
    seconds = [_sample(case, 1) for _ in range(_WARM_CALLS)]
    calls[name] = max(int(SAMPLE_SECONDS / min(seconds)), 1)
  samples = {name: [] for name in cases}
  order = list(cases)
  for _ in range(repeats):
    for name in order:
      samples[name].append(_sample(cases[name], calls[name]))
    order.reverse()
  return {name: np.array(seconds) for name, seconds in samples.items()}


def milliseconds(seconds: np.ndarray) -> str:
  """Returns the text 'median (least-greatest)', in milliseconds."""
  low, middle, high = 1e3 * np.quantile(seconds, (0, 0.5, 1))
  return f'{middle:.2f} ({low:.2f}-{high:.2f})'


def verdict(seconds: Mapping[Any, np.ndarray]) -> str:
  """Returns a line that says whether the samples of each case agree.

  Interleaving does not help against every disturbance: libraries whose threads
  wait for each other in a loop become a hundred times slower if there is not a
  core for each thread.
  """
  disturbed = [
    ' '.join(name) if isinstance(name, tuple) else name
    for name, samples in seconds.items()
    if np.quantile(samples, 0.75) > _DISTURBED * np.min(samples)
  ]
  if not disturbed:
    return 'undisturbed'
  return 'NOT A RESULT, the machine was busy; samples differ for ' + ', '.join(
    disturbed
  )


class Quotient(NamedTuple):
  """The quotient of the times of two cases.

  Attributes:
    median: the median of the quotients of the rounds.
    low, high: the first and the third quartile of these quotients.
    least: the quotient of the shortest samples, which other work on the
      machine disturbs the least.
  """

  median: float
  low: float
  high: float
  least: float

  def __str__(self):
    return f'{self.median:.3f} ({self.low:.3f}-{self.high:.3f})'


def against(
  seconds: Mapping[str, np.ndarray], above: str, below: str
) -> tuple[str, ...]:
  """Returns the cells of a comparison of two cases for a table.

  The cells are the time of `below`, the time of `above`, the quotient
  above / below, and the quotient of their shortest samples.
  """
  found = quotient(seconds[above], seconds[below])
  times = (milliseconds(seconds[name]) for name in (below, above))
  return (*times, str(found), f'{found.least:.2f}')


def comparison(
  seconds: Mapping[str, np.ndarray], above: str, below: str, goal: str = ''
) -> str:
  """Returns a line with the quotient above / below and its goal, if any."""
  found = quotient(seconds[above], seconds[below])
  line = f'{above} / {below}: {found}; of the least {found.least:.3f}'
  return f'{line}; goal: {goal}' if goal else line


def quotient(above: np.ndarray, below: np.ndarray) -> Quotient:
  """Returns the quotient of two cases that were sampled in the same rounds."""
  low, middle, high = np.quantile(above / below, (0.25, 0.5, 0.75))
  least = np.min(above) / np.min(below)
  return Quotient(*(float(x) for x in (middle, low, high, least)))


def parser(name: str, **numbers: int) -> argparse.ArgumentParser:
  """Returns a parser of `--cores`, and of other flags that are integers.

  Args:
    name: the name of the benchmark's module.
    **numbers: the default of each other flag.
  """
  made = argparse.ArgumentParser(prog=f'python -m benchmarks.{name}')
  for flag, default in numbers.items():
    made.add_argument(f'--{flag}', type=int, default=default)
  made.add_argument(
    '--cores', type=int, default=0, help='how many to use; 0: all there are'
  )
  return made


def positive(text: str) -> int:
  """Returns the integer of a flag, which must be 1 or greater."""
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f'{text!r}: must be an integer >= 1')
  return int(text)


def start(
  parser: argparse.ArgumentParser,
  arguments: Sequence[str] | None,
  **versions: str,
) -> argparse.Namespace:
  """Parses flags, binds this process to some cores, and prints the machine.

  This function must be called before jax counts the cores.

  Args:
    parser: a parser that the function `parser` returned; it may have further
      flags.
    arguments: the command line; None = the command line of this process.
    **versions: the versions of other libraries, which are printed too.

  Returns:
    The values of the flags. `cores` is the number of cores in use.
  """
  flags = parser.parse_args(arguments)
  # The median of fewer samples would be unreliable.
  if getattr(flags, 'repeats', MIN_REPEATS) < MIN_REPEATS:
    parser.error(f'--repeats={flags.repeats}: must be {MIN_REPEATS} or greater')
  cores = sorted(os.sched_getaffinity(0))
  if flags.cores:
    cores = cores[-flags.cores :]
    os.sched_setaffinity(0, cores)
  flags.cores = len(cores)
  print(environment(**versions), end='\n\n', flush=True)
  return flags


def environment(**versions: str) -> str:
  """Returns the lines about versions, devices, machine and flags."""
  cores = sorted(os.sched_getaffinity(0))
  versions = {
    'python': platform.python_version(),
    'jax': jax.__version__,
    'numpy': np.__version__,
    **versions,
  }
  flags = {name: os.environ[name] for name in _FLAGS if name in os.environ}
  load = ' '.join(f'{x:.2f}' for x in os.getloadavg())
  device = jax.devices()[0].device_kind
  return '\n'.join(
    (
      'versions: ' + ', '.join(f'{k} {v}' for k, v in versions.items()),
      f'device: {jax.device_count()} x {jax.devices()[0].platform} ({device})',
      f'machine: {platform.machine()}, {len(cores)} cores, load {load}',
      'flags: ' + (', '.join(f'{k}={v}' for k, v in flags.items()) or 'none'),
    )
  )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Returns a Markdown table with aligned columns."""
  lines = [header, *rows]
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  rule = ['-' * width for width in widths]
  return '\n'.join(
    '| '
    + ' | '.join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))
    + ' |'
    for line in (header, rule, *rows)
  )
