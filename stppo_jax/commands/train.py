"""Train a policy; the same command resumes after any interruption.

python -m stppo_jax train --config=FILE.py[:ALGORITHM] --workdir=DIR
    [--config.KEY=VALUE ...] [--restart] [--verify_resume=STEPS]
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
  --verify_resume=STEPS         trains twice on this machine: in DIR/whole in
                                one piece, and in DIR/cut resumed after STEPS;
                                then compares the results bit for bit
  --coordinator=HOST:PORT       the address of process 0, if several processes
                                train together and no cluster tells them; see
                                docs/hosts.md
  --num_processes=N             the number of processes
  --process_id=I                the number of this one, from 0
  --start_timeout=SECONDS       how long to wait for the others; by default 300
"""

from collections.abc import Sequence
import pathlib

from stppo_jax import exits
from stppo_jax.commands.flags import command_line
from stppo_jax.commands.flags import configuration
from stppo_jax.tools import resume_check


def main(argv: Sequence[str]) -> int:
  """Trains until the configured number of steps; returns the exit code."""
  flags = command_line.flags(
    workdir='',
    restart=False,
    verify_resume=command_line.integer(lower_bound=1),
    coordinator='',
    num_processes=0,
    process_id=-1,
    start_timeout=command_line.number(300.0, lower_bound=0),
  )
  given = configuration.split(argv, flags, required=('config', 'workdir'))
  writer = resume_check.COMMAND if flags.verify_resume else 'train'
  config = configuration.checked(flags, given, writer=writer)
  if flags.verify_resume:
    return resume_check.verify(
      argv,
      pathlib.Path(flags.workdir),
      after=flags.verify_resume,
      num_steps=config.num_steps,
      is_alone=not (flags.restart or flags.coordinator),
    )
  # Imported late, so that a wrong flag is reported before jax is loaded.
  from stppo_jax.parallel import distributed
  from stppo_jax.parallel import mesh

  with exits.as_misconfigured():
    place = distributed.place(
      flags.coordinator,
      flags.num_processes,
      flags.process_id,
      collectors=config.mesh.collectors,
    )
  with distributed.joined(
    place,
    start_timeout=flags.start_timeout,
    collectors=config.mesh.collectors,
  ) as hosts:
    if hosts.learns:
      with exits.as_misconfigured():
        mesh.make_learning_mesh(**config.mesh)
    # Imported only here, because these imports take seconds.
    from stppo_jax.tools.plan import search
    from stppo_jax.training import checks
    from stppo_jax.training import loop

    try:
      return loop.train(
        config, flags.workdir, restart=flags.restart, hosts=hosts
      )
    except checks.DoesNotFit as error:
      advice = search.advice_at_start(error.config, error.limit)
      raise exits.Misconfigured(f'{error}; {advice}') from error
