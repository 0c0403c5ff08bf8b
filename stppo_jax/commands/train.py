"""Train a policy; the same command resumes after any interruption.

python -m stppo_jax train --config=FILE.py[:ALGORITHM] --workdir=DIR
    [--config.KEY=VALUE ...] [--restart]
    [--coordinator=HOST:PORT --num_processes=N --process_id=I]
    [--start_timeout=SECONDS]

  --config=FILE.py[:ALGORITHM]  a config file such as configs/quickstart.py, and
                                a key of configs/algorithms.py
  --workdir=DIR                 the folder of the run; docs/commands.md lists
                                what it holds
  --config.KEY=VALUE            sets a key of configs/base.py; --config.KEY and
                                --noconfig.KEY set a boolean
  --restart                     moves what DIR holds into a subfolder and begins
                                a new run
  --coordinator=HOST:PORT       the address of process 0, if several processes
                                train together and no cluster tells them; see
                                docs/hosts.md
  --num_processes=N             the number of processes
  --process_id=I                the number of this one, from 0
  --start_timeout=SECONDS       how long to wait for the others; by default 300
"""

from collections.abc import Sequence

from stppo_jax.commands.flags import configuration


def main(argv: Sequence[str]) -> int:
  """Trains until the configured number of steps; returns the exit code."""
  arguments = configuration.parse(
    argv,
    options={
      'coordinator': '',
      'num_processes': 0,
      'process_id': -1,
      'start_timeout': 300.0,
    },
    switches=('restart',),
    writer='train',
  )
  assert arguments.workdir is not None  # parse() has made sure of it
  # Imported late: a wrong flag is answered before jax is loaded.
  from stppo_jax.parallel import distributed
  from stppo_jax.training import loop

  options = arguments.options
  try:
    place = distributed.place(
      options['coordinator'], options['num_processes'], options['process_id']
    )
  except ValueError as error:
    raise configuration.ConfigurationError([str(error)]) from error
  with distributed.joined(
    place, start_timeout=options['start_timeout']
  ) as hosts:
    return loop.train(
      arguments.config,
      arguments.workdir,
      restart='restart' in arguments.switches,
      hosts=hosts,
    )
