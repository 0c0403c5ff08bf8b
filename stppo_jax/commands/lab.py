"""Save a collected batch once, and recompute any algorithm on it offline.

python -m stppo_jax lab collect --config=FILE.py[:ALGORITHM] --out=F.npz
    [--config.KEY=VALUE ...] [--workdir=DIR] [--updates=N] [--continuations=N]
python -m stppo_jax lab score --batch=F.npz --algorithm=st_ppo [--out=O.npz]
    [--config=FILE.py[:ALGORITHM]] [--set KEY=VALUE ...] [--advantages=A.npz]
    [--entropy_coefficient=X] [--float64]
python -m stppo_jax lab advantages --batch=F.npz --estimator=gae [--out=A.npz]
    [--config=FILE.py[:ALGORITHM]] [--set KEY=VALUE ...]
    [--kl=k1 [--kl_coefficient=X]] [--float64]
python -m stppo_jax lab compare --batch=F.npz
    --algorithms=ALGORITHM[:KEY=VALUE ...],...
    [--config=FILE.py] [--advantages=A.npz] [--float64] [--json]
    [--plot=P.png]
python -m stppo_jax lab levels --batch=F.npz
    --algorithms=ALGORITHM[:KEY=VALUE ...],...
    [--config=FILE.py] [--advantages=A.npz] [--float64] [--plot=P.png]
python -m stppo_jax lab values --batch=F.npz [--float64] [--json] [--plot=P.png]

collect samples one batch of trajectories, annotates it, makes some updates and
saves the arrays. The other commands need no model and run on CPU. They read any
file that has the arrays they use; docs/lab.md lists these arrays. score and
advantages print one JSON object.

  --config=FILE.py[:ALGORITHM]  collect: the config of the run; others: the
                                options of that file, not those of the table of
                                algorithms
  --config.KEY=VALUE            sets a key of that config
  --workdir=DIR                 samples with the newest checkpoint of this run,
                                not with the policy that the config starts from
  --updates=N                   updates before saving; by default as many as one
                                step makes
  --continuations=N             continues each trajectory N times from the
                                beginning and the end of each of its turns, and
                                saves what it earned, for `lab values`
  --batch=F.npz                 the saved batch
  --algorithm=NAME              the algorithm, a key of configs/algorithms.py
  --algorithms=NAME,NAME,...    several of them, each with its own settings
  --estimator=NAME              the advantage estimator
  --set KEY=VALUE               sets an option of the algorithm, such as
                                correction.clipping_bias.tau, or of the
                                estimator, such as gamma
  --advantages=A.npz            advantages that `lab advantages` wrote; own:
                                those of the algorithm's own estimator; without
                                it those of the batch
  --entropy_coefficient=X       weight of the entropy bonus, 0 by default
  --kl=NAME                     subtracts this KL estimate from the rewards
  --kl_coefficient=X            times X, not the coefficient of the file
  --out=FILE.npz                the file that is written
  --float64                     computes in double precision
  --json                        prints all metrics as JSON
  --plot=FILE.png               the picture that is written
"""

from collections.abc import Sequence
import os
from typing import Any

from stppo_jax import exits
from stppo_jax.commands.flags import command_line
from stppo_jax.commands.flags import configuration
from stppo_jax.commands.flags import lab_flags

# jax and the modules that import jax are imported inside the functions, so that
# a wrong flag is reported at once, and `main` can still choose the platform.

# The bounds of a number that is neither infinite nor nan.
_FINITE = {'lower_bound': -1e30, 'upper_bound': 1e30}
# The flags of each command. Commands that read a saved batch also have the
# flags that `lab_flags.of_batch` adds.
_FLAGS: dict[str, dict[str, Any]] = {
  'collect': {},
  'score': {
    'config': '',
    'out': '',
    'algorithm': '',
    'advantages': '',
    'set': command_line.REPEATED,
    'entropy_coefficient': command_line.number(0.0, **_FINITE),
  },
  'advantages': {
    'config': '',
    'out': '',
    'estimator': '',
    'kl': '',
    'set': command_line.REPEATED,
    'kl_coefficient': command_line.number(**_FINITE),
  },
  'compare': {
    'config': '',
    'algorithms': '',
    'advantages': '',
    'json': False,
    'plot': '',
  },
  'levels': {'config': '', 'algorithms': '', 'advantages': '', 'plot': ''},
  'values': {'json': False, 'plot': ''},
}


def main(argv: Sequence[str]) -> int:
  """Runs the subcommand `argv[0]`; returns its exit code."""
  name, words = command_line.subcommand('lab', argv, _FLAGS), argv[1:]
  if name == 'collect':
    return _collect(words)
  os.environ['JAX_PLATFORMS'] = 'cpu'
  flags = lab_flags.of_batch(**_FLAGS[name])
  options: Any = None
  if name == 'values':
    lab_flags.parse(flags, words)
  elif name == 'advantages':
    lab_flags.parse(flags, words)
    if not flags.config and not flags.estimator:
      raise exits.Misconfigured('--estimator: missing')
    if flags.kl_coefficient is not None and not flags.kl:
      raise exits.Misconfigured('--kl_coefficient: goes with --kl only')
    options = lab_flags.estimator(
      flags.estimator, flags.set, config=flags.config
    )
  elif name == 'score':
    lab_flags.parse(flags, words, required='algorithm')
    options = lab_flags.algorithm(
      flags.algorithm, flags.set, config=flags.config
    )
  else:
    lab_flags.parse(flags, words, required='algorithms')
    options = lab_flags.algorithms(flags.algorithms, config=flags.config)
  from stppo_jax.tools.lab import offline

  commands = {
    'score': offline.score,
    'advantages': offline.advantages,
    'compare': offline.compare,
    'levels': offline.levels,
    'values': offline.values,
  }
  commands[name](flags, options)
  return 0


def _collect(argv: Sequence[str]) -> int:
  """Collects and annotates a batch, makes updates and saves the arrays."""
  flags = command_line.flags(
    out='',
    workdir='',
    updates=command_line.integer(lower_bound=0),
    continuations=command_line.integer(0, lower_bound=0),
  )
  config = configuration.parse(argv, flags=flags, required=('out',))
  folders = configuration.folders_read(config)
  command_line.refuse(lab_flags.out_problems(flags, folders))
  from stppo_jax.tools.lab import collection

  collection.write(
    config,
    flags.out,
    workdir=flags.workdir or None,
    num_updates=flags.updates,
    continuations=flags.continuations,
  )
  return 0
