"""Train on pairs of collected trajectories (TDPO); resumes like train.

python -m stppo_jax prefer --config=FILE.py --batch=FILE.npz --workdir=DIR
    [--config.preference.name=tdpo1 --config.KEY=VALUE ...] [--restart]

  --config=FILE.py    the config, as for train
  --batch=FILE.npz    trajectories, such as `lab collect` writes
  --workdir=DIR       the folder of the run
  --config.KEY=VALUE  sets a key of the config
  --restart           moves what DIR holds into a subfolder and begins a new run

FILE.npz holds arrays named as in stppo_jax/batch.py: tokens_BL, loss_mask_BL,
rewards_BL and group_ids_B. The best and the worst trajectory of each group are
a pair. A group of equal rewards gives no pair. The policy starts from
model.path, and the trained policy is written to DIR/policy.
"""

from collections.abc import Sequence

from stppo_jax.commands.flags import command_line
from stppo_jax.commands.flags import configuration


def main(argv: Sequence[str]) -> int:
  """Trains on pairs of trajectories; returns the exit code."""
  flags = command_line.flags(workdir='', restart=False, batch='')
  config = configuration.parse(
    argv, flags=flags, required=('workdir', 'batch'), writer='prefer'
  )
  # Imported late, so that a wrong flag is reported before jax is loaded.
  from stppo_jax.training import preference

  return preference.prefer(
    config, flags.batch, flags.workdir, restart=flags.restart
  )
