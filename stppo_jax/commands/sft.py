"""Train a policy on demonstrations of dialogues, before RL; resumes like train.

python -m stppo_jax sft --config=FILE.py[:ALGORITHM] --workdir=DIR
    [--config.KEY=VALUE ...] [--restart]

  --config=FILE.py[:ALGORITHM]  the config, as for train
  --workdir=DIR                 the folder of the run
  --config.KEY=VALUE            sets a key of the config
  --restart                     moves what DIR holds into a subfolder and begins
                                a new run

Writes the trained policy to DIR/policy as a Hugging Face directory, which can
be the model.path of a run.
"""

from collections.abc import Sequence

from stppo_jax.commands.flags import command_line
from stppo_jax.commands.flags import configuration


def main(argv: Sequence[str]) -> int:
  """Trains on demonstrations; returns the exit code."""
  flags = command_line.flags(workdir='', restart=False)
  config = configuration.parse(
    argv, flags=flags, required=('workdir',), writer='sft'
  )
  # Imported late, so that a wrong flag is reported before jax is loaded.
  from stppo_jax.training import sft

  return sft.run(config, flags.workdir, restart=flags.restart)
