"""Train a policy on demonstrations of dialogues, before RL.

python -m stppo_jax sft --config=FILE.py[:ALGORITHM] --workdir=DIR
    [--config.KEY=VALUE ...]

Writes the policy to DIR as a Hugging Face directory, which can be the
model.path of a run.
"""

from collections.abc import Sequence

from stppo_jax.commands import configuration


def main(argv: Sequence[str]) -> int:
  """Trains on demonstrations; returns the exit code."""
  arguments = configuration.parse(argv, writer='sft')
  assert arguments.workdir is not None  # parse() has made sure of it
  # Imported late: a wrong flag is answered before jax is loaded.
  from stppo_jax.training import sft

  return sft.run(arguments.config, arguments.workdir)
