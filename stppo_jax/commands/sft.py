"""Teach the form of the dialogue from demonstrations, before RL.

python -m stppo_jax sft --config=FILE.py[:ALGORITHM] --workdir=DIR
    [--config.KEY=VALUE ...]
"""

from collections.abc import Sequence

from stppo_jax.commands import configuration


def main(argv: Sequence[str]) -> int:
  """Trains on demonstrations; returns the exit code."""
  arguments = configuration.parse(argv)
  assert arguments.workdir is not None  # parse() has made sure of it
  # Imported late: a wrong flag is answered before jax is loaded.
  from stppo_jax.training import sft

  return sft.run(arguments.config, arguments.workdir)
