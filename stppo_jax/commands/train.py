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
from typing import Any

from stppo_jax.commands.flags import configuration
from stppo_jax.commands.flags import recorded_config
from stppo_jax.tools import resume_check


def main(argv: Sequence[str]) -> int:
  """Trains until the configured number of steps; returns the exit code."""
  named = [flag for flag in argv if flag.startswith('--verify_resume')]
  verifies = bool(named) and named[-1] != resume_check.NONE
  arguments = configuration.parse(
    argv,
    options={
      'verify_resume': 0,
      'coordinator': '',
      'num_processes': 0,
      'process_id': -1,
      'start_timeout': 300.0,
    },
    switches=('restart',),
    writer=resume_check.COMMAND if verifies else 'train',
  )
  assert arguments.workdir is not None  # parse() has made sure of it
  if verifies:
    return _verify(argv, arguments, arguments.workdir)
  source = _source(arguments)
  # Imported late: a wrong flag is answered before jax is loaded.
  from stppo_jax.parallel import distributed
  from stppo_jax.parallel import mesh

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
    try:
      mesh.make_learning_mesh(**arguments.config.mesh)
    except ValueError as error:
      raise configuration.ConfigurationError([str(error)]) from error
    # Imported later still, because it takes seconds.
    from stppo_jax.training import loop

    return loop.train(
      arguments.config,
      arguments.workdir,
      restart='restart' in arguments.switches,
      source=source,
      hosts=hosts,
    )


def _source(arguments: configuration.Arguments) -> Any:
  """Returns the config of the run that `init_from` names.

  None if there is none, or if the start was made from it already.
  """
  folder, workdir = arguments.config.init_from, arguments.workdir
  assert workdir is not None
  is_made = (workdir / 'start').is_dir() and not arguments.switches
  if not folder or is_made:
    return None
  try:
    config = recorded_config.read(pathlib.Path(folder))
    errors = recorded_config.prepare_export(config)
  except (OSError, ValueError) as error:
    errors = [str(error)]
  if errors:
    raise configuration.ConfigurationError(
      [f'config.init_from={folder}: {line}' for line in errors]
    )
  return config.lock()


def _verify(
  argv: Sequence[str],
  arguments: configuration.Arguments,
  workdir: pathlib.Path,
) -> int:
  """Checks that the run can be resumed; returns the exit code."""
  after, num_steps = (
    arguments.options['verify_resume'],
    arguments.config.num_steps,
  )
  errors = []
  if not 0 < after < num_steps:
    errors.append(
      f'--verify_resume={after}: must be greater than 0 and less than '
      f'num_steps={num_steps}'
    )
  if arguments.switches or arguments.options['coordinator']:
    errors.append(
      '--verify_resume: needs one machine and no --restart; use a new folder'
    )
  if errors:
    raise configuration.ConfigurationError(errors)
  return resume_check.verify(argv, workdir, after=after, num_steps=num_steps)
