"""Train a policy; the same command resumes after any interruption.

python -m stppo_jax train --config=FILE.py[:ROW] --workdir=DIR
    [--config.KEY=VALUE ...]
"""

from collections.abc import Sequence

from stppo_jax.commands import configuration


def main(argv: Sequence[str]) -> int:
  arguments = configuration.parse(argv)
  # Late, so that a wrong flag is answered before jax is imported.
  from stppo_jax.training import loop

  return loop.train(arguments.config, arguments.workdir)
