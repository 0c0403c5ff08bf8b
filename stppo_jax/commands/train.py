"""Train a policy; the same command resumes after any interruption.

python -m stppo_jax train --config=FILE.py[:ALGORITHM] --workdir=DIR
    [--config.KEY=VALUE ...] [--restart]

  --config=FILE.py[:ALGORITHM]  a config file such as configs/quickstart.py, and
                                a key of configs/algorithms.py
  --workdir=DIR                 the folder of the run; docs/commands.md lists
                                what it holds
  --config.KEY=VALUE            sets a key of configs/base.py; --config.KEY and
                                --noconfig.KEY set a boolean
  --restart                     moves what DIR holds into a subfolder and begins
                                a new run
"""

from collections.abc import Sequence

from stppo_jax.commands import configuration


def main(argv: Sequence[str]) -> int:
  """Trains until the configured number of steps; returns the exit code."""
  arguments = configuration.parse(argv, switches=('restart',), writer='train')
  assert arguments.workdir is not None  # parse() has made sure of it
  # Imported late: a wrong flag is answered before jax is loaded.
  from stppo_jax.training import loop

  return loop.train(
    arguments.config,
    arguments.workdir,
    restart='restart' in arguments.switches,
  )
