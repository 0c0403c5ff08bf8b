"""Evaluate the newest checkpoint of a run on held-out questions.

python -m stppo_jax evaluate --config=FILE.py[:ALGORITHM] --workdir=DIR
    [--config.KEY=VALUE ...]

  --config=FILE.py[:ALGORITHM]  the config of the run
  --workdir=DIR                 the folder of the run
  --config.KEY=VALUE            sets a key of the config, as the run did
"""

from collections.abc import Sequence

from stppo_jax.commands import configuration


def main(argv: Sequence[str]) -> int:
  """Evaluates the newest checkpoint; returns the exit code."""
  arguments = configuration.parse(argv)
  assert arguments.workdir is not None  # parse() has made sure of it
  # Imported late: a wrong flag is answered before jax is loaded.
  from stppo_jax.training import evaluation

  return evaluation.evaluate(arguments.config, arguments.workdir)
