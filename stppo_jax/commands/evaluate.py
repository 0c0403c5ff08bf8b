"""Evaluate the newest checkpoint of a run on held-out questions.

python -m stppo_jax evaluate --config=FILE.py[:ROW] --workdir=DIR
    [--config.KEY=VALUE ...]
"""

from collections.abc import Sequence

from stppo_jax.commands import configuration


def main(argv: Sequence[str]) -> int:
  arguments = configuration.parse(argv)
  # Late, so that a wrong flag is answered before jax is imported.
  from stppo_jax.training import evaluation

  return evaluation.evaluate(arguments.config, arguments.workdir)
