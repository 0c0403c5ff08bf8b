"""Runs stppo_jax by a clock that another process sets.

    python -m benchmarks.jumping_clock FILE COMMAND FLAGS

To set the clock of the machine needs rights, and would strike whoever else uses
it. So only the Python code of this process sees another time: `time.time()` is
that of the machine plus the seconds that FILE holds. Nothing of stppo_jax
imports the name itself, so that all of it is deceived.
"""

from collections.abc import Sequence
import pathlib
import sys
import time


def main(file: pathlib.Path, argv: Sequence[str]) -> int:
  """Runs a command as `python -m stppo_jax` does; returns the exit code."""
  clock = time.time

  def now() -> float:
    try:
      return clock() + float(file.read_text('ascii'))
    except (OSError, ValueError):  # there is none yet
      return clock()

  time.time = now
  from stppo_jax import __main__
  from stppo_jax.training.stopping import interruption

  code = __main__.main(argv)
  if code in interruption.EXIT_CODES.values():
    interruption.end_process(code)
  return code


if __name__ == '__main__':
  sys.exit(main(pathlib.Path(sys.argv[1]), sys.argv[2:]))
