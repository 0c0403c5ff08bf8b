"""Evaluate the newest checkpoint of a run on held-out questions.

python -m stppo_jax evaluate --config=FILE.py[:ALGORITHM] --workdir=DIR
    [--config.KEY=VALUE ...]

DIR is the folder of the run, and the config must be that of the run.
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
