"""Runs stppo_jax with a clock that another process sets.

    python -m benchmarks.jumping_clock FILE COMMAND FLAGS

Setting the clock of the machine needs special rights, and would affect all
users of the machine. So only the Python code of this process sees another time:
`time.time()` is the time of the machine plus the seconds that FILE holds. All
modules of stppo_jax see this time, because none imports the function by name.
"""

from collections.abc import Sequence
import pathlib
import sys
import time

import stppo_jax


def main(file: pathlib.Path, argv: Sequence[str]) -> None:
  """Runs a command as `python -m stppo_jax` does."""
  clock = time.time

  def now() -> float:
    try:
      return clock() + float(file.read_text('ascii'))
    except (OSError, ValueError):  # FILE does not exist yet
      return clock()

  time.time = now
  sys.argv[1:] = argv
  stppo_jax.console()


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]), sys.argv[2:])
