"""Teach the form of the dialogue from demonstrations, before RL.

python -m stppo_jax sft --config=FILE.py[:ROW] --workdir=DIR
    [--config.KEY=VALUE ...]
"""

from collections.abc import Sequence

from stppo_jax.commands import configuration


def main(argv: Sequence[str]) -> int:
  arguments = configuration.parse(argv)
  # Late, so that a wrong flag is answered before jax is imported.
  from stppo_jax.training import sft

  return sft.run(arguments.config, arguments.workdir)
