"""Save a collected batch once, and recompute any algorithm on it offline.

python -m stppo_jax lab collect --config=FILE.py[:ALGORITHM] --out=F.npz
    [--config.KEY=VALUE ...] [--workdir=DIR] [--updates=N]
python -m stppo_jax lab score --batch=F.npz --algorithm=st_ppo [--out=O.npz]
    [--config=FILE.py[:ALGORITHM]] [--set KEY=VALUE ...] [--advantages=A.npz]
    [--entropy_coefficient=X] [--float64]
python -m stppo_jax lab advantages --batch=F.npz --estimator=gae [--out=A.npz]
    [--config=FILE.py[:ALGORITHM]] [--set KEY=VALUE ...]
    [--kl=k1 [--kl_coefficient=X]] [--float64]
python -m stppo_jax lab compare --batch=F.npz
    --algorithms=ALGORITHM[:KEY=VALUE ...],...
    [--config=FILE.py] [--advantages=A.npz] [--float64] [--json]

collect samples one batch of trajectories, annotates it, makes some updates and
saves the arrays. The other commands need no model, run on CPU, and read any
file that has the arrays they use; docs/lab.md lists them. score and advantages
print one JSON object.

  --config=FILE.py[:ALGORITHM]  collect: the config of the run; others: the
                                options of that file, not those of the table of
                                algorithms
  --config.KEY=VALUE            sets a key of that config
  --workdir=DIR                 samples with the newest checkpoint of this run,
                                not with the policy that the config starts from
  --updates=N                   updates before saving; by default as many as one
                                step makes
  --batch=F.npz                 the saved batch
  --algorithm=NAME              the algorithm, a key of configs/algorithms.py
  --algorithms=NAME,NAME,...    several of them, each with its own settings
  --estimator=NAME              the advantage estimator
  --set KEY=VALUE               sets an option of the algorithm, such as
                                correction.clipping_bias.tau, or of the
                                estimator, such as gamma
  --advantages=A.npz            advantages that `lab advantages` wrote
  --entropy_coefficient=X       weight of the entropy bonus, 0 by default
  --kl=NAME                     subtracts this KL estimate from the rewards
  --kl_coefficient=X            times X, not the coefficient of the file
  --out=FILE.npz                the file that is written
  --float64                     computes in double precision
  --json                        prints all metrics as JSON
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import json
import math
import os
import sys
from typing import Any

from stppo_jax import settings
from stppo_jax.commands.flags import configuration
from stppo_jax.commands.flags import lab_algorithms
from stppo_jax.commands.flags import lab_flags

# jax and the modules that import it are imported inside the functions: a wrong
# flag is reported at once, and `_on_cpu` must choose the platform first.


def main(argv: Sequence[str]) -> int:
  """Runs the subcommand `argv[0]`; returns its exit code."""
  if not argv or argv[0] not in _COMMANDS:
    name = argv[0] if argv else ''
    problem = f'lab {name}: unknown command' if name else 'lab: no command'
    choices = settings.closest(name, list(_COMMANDS))
    raise configuration.ConfigurationError([problem + choices])
  return _COMMANDS[argv[0]](argv[1:])


def _collect(argv: Sequence[str]) -> int:
  """Collects, annotates and updates once; saves the arrays."""
  arguments = configuration.parse(
    argv, workdir=False, options={'out': '', 'workdir': '', 'updates': None}
  )
  options = arguments.options
  num_updates = options['updates']
  errors = [] if options['out'] else ['--out: missing']
  errors += lab_flags.output_errors(
    options, configuration.folders_read(arguments.config)
  )
  if num_updates is not None and (
    type(num_updates) is not int or num_updates < 0
  ):
    errors.append(f'--updates={num_updates}: must be an integer, 0 or greater')
  lab_flags.raise_if(errors)
  from stppo_jax.tools.lab import collection

  arrays = collection.collect(
    arguments.config, workdir=arguments.workdir, num_updates=num_updates
  )
  _save(options['out'], arrays)
  mask_BL = arrays['loss_mask_BL']
  print(
    f'{options["out"]}: {len(mask_BL)} rows, {arrays["lengths_B"].sum()} '
    f'tokens, {mask_BL.sum()} policy tokens'
  )
  return 0


def _score(argv: Sequence[str]) -> int:
  """Computes loss, gradient and metrics of one algorithm."""
  flags = lab_flags.split(
    argv,
    ('batch', 'algorithm'),
    ('out', 'config', 'advantages', 'entropy_coefficient'),
  )
  name = flags.values['algorithm']
  lab_flags.raise_if(flags.errors)
  coefficient = lab_flags.number(flags, 'entropy_coefficient') or 0.0
  options = lab_algorithms.algorithm(
    name, flags.lists['set'], config=flags.values['config']
  )
  with _on_cpu(flags):
    from stppo_jax.rl import algorithm as algorithm_lib
    from stppo_jax.tools.lab import lab
    from stppo_jax.tools.lab import saved_batch

    algorithm = options.build(algorithm_lib.build_algorithm)
    required = lab.required_arrays(algorithm, entropy_coefficient=coefficient)
    arrays = _arrays_of_algorithms(flags, dict.fromkeys(sorted(required), name))
    with lab_flags.errors_name(f'--algorithm={name}', (saved_batch.NotFinite,)):
      found = lab.loss_and_gradient(
        algorithm, arrays, entropy_coefficient=coefficient
      )
  return _finish(flags, found.metrics, found.arrays)


def _advantages(argv: Sequence[str]) -> int:
  """Computes the advantages and returns of one estimator."""
  flags = lab_flags.split(
    argv, ('batch',), ('estimator', 'out', 'config', 'kl', 'kl_coefficient')
  )
  values, errors = flags.values, list(flags.errors)
  if not values['config']:
    errors += lab_flags.missing(flags, 'estimator')
  if values['kl_coefficient'] and not values['kl']:
    errors.append('--kl_coefficient: goes with --kl only')
  lab_flags.raise_if(errors)
  coefficient = lab_flags.number(flags, 'kl_coefficient')
  options = lab_algorithms.estimator(
    values['estimator'], flags.lists['set'], config=values['config']
  )
  with _on_cpu(flags):
    from stppo_jax.tools.lab import estimates
    from stppo_jax.tools.lab import saved_batch

    estimator = options.build(estimates.build_estimator)
    loaded = _load(flags)
    required = estimates.required_arrays(estimator, loaded)
    readers = {name: str(estimator.name) for name in sorted(required)}
    if values['kl']:
      with lab_flags.errors_name(f'--kl={values["kl"]}'):
        estimates.check_penalty(estimator, values['kl'])
      readers |= dict.fromkeys(estimates.PENALTY_ARRAYS, '--kl')
      if coefficient is None:
        readers['kl_coefficient'] = '--kl without --kl_coefficient'
    with _errors_name_batch(flags):
      arrays = saved_batch.select(loaded, readers, dtype=_dtype(flags))
      estimates.check(estimator, arrays)
    if values['kl']:
      if coefficient is None:
        coefficient = float(arrays['kl_coefficient'])
      arrays = estimates.penalized(
        arrays, estimator=values['kl'], coefficient=coefficient
      )
    with lab_flags.errors_name(
      f'--estimator={estimator.name}', (saved_batch.NotFinite,)
    ):
      estimate = estimates.estimate(estimator, arrays)
  return _finish(flags, estimate.metrics, estimate.arrays)


def _compare(argv: Sequence[str]) -> int:
  """Prints several algorithms beside each other."""
  flags = lab_flags.split(
    argv, ('batch', 'algorithms'), ('config', 'advantages'), lists=(),
    switches=('json',),
  )  # fmt: skip
  options, errors = {}, list(flags.errors)
  labels = lab_algorithms.labels(flags.values['algorithms'])
  for label in labels if flags.values['algorithms'] else ():
    try:
      config = flags.values['config']
      options[label] = lab_algorithms.labelled(label, config=config)
    except configuration.ConfigurationError as error:
      errors += error.lines
  lab_flags.raise_if(errors)
  with _on_cpu(flags):
    from stppo_jax.rl import algorithm as algorithm_lib
    from stppo_jax.tools.lab import comparison
    from stppo_jax.tools.lab import lab
    from stppo_jax.tools.lab import saved_batch

    compared = {
      label: chosen.build(algorithm_lib.build_algorithm)
      for label, chosen in options.items()
    }
    # A missing array is reported for the first algorithm that reads it.
    readers = {
      array: label
      for label, algorithm in reversed(compared.items())
      for array in sorted(
        lab.required_arrays(algorithm, entropy_coefficient=0.0)
      )
    }
    arrays = _arrays_of_algorithms(flags, readers)
    with lab_flags.errors_name('--algorithms', (saved_batch.NotFinite,)):
      result = comparison.compare(compared, arrays)
  if 'json' in flags.switches:
    metrics = {
      label: _finite_metrics(flags, metrics, f'{label}: ')
      for label, metrics in result.metrics.items()
    }
    # The key was 'rows' before algorithms were called so; scripts read it.
    print(_json({'rows': metrics, 'cosines': result.cosines}))
  else:
    print(comparison.table(result))
  return 0


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
  'collect': _collect,
  'score': _score,
  'advantages': _advantages,
  'compare': _compare,
}


@contextlib.contextmanager
def _on_cpu(flags: configuration.Flags) -> Iterator[None]:
  """Runs jax on CPU, in double precision with `--float64`.

  jax is first imported here, so that the platform can still be chosen.
  """
  os.environ['JAX_PLATFORMS'] = 'cpu'
  import jax

  with jax.enable_x64('float64' in flags.switches):
    yield


def _dtype(flags: configuration.Flags):
  import numpy as np

  return np.float64 if 'float64' in flags.switches else np.float32


def _errors_name_batch(flags: configuration.Flags):
  return lab_flags.errors_name(f'--batch={flags.values["batch"]}')


def _load(flags: configuration.Flags):
  """Returns the arrays of the file `--batch`, unchecked."""
  from stppo_jax.rollout import batch_file

  with _errors_name_batch(flags):
    return batch_file.load(flags.values['batch'])


def _arrays_of_algorithms(
  flags: configuration.Flags, readers: Mapping[str, str]
):
  """Returns the checked arrays that algorithms are computed on.

  Optional arrays only add metrics; one that is not valid is left out, with a
  warning.

  Args:
    flags: the flags of the command.
    readers: name of each required array to the algorithm that reads it.
  """
  from stppo_jax.rollout import batch_file
  from stppo_jax.tools.lab import lab
  from stppo_jax.tools.lab import saved_batch

  loaded, dtype = _load(flags), _dtype(flags)
  path = flags.values['advantages']
  if path:
    readers = {
      name: reader
      for name, reader in readers.items()
      if name != 'advantages_BL'
    }
  with _errors_name_batch(flags):
    arrays = saved_batch.select(loaded, readers, dtype=dtype)
  if path:
    with lab_flags.errors_name(f'--advantages={path}'):
      arrays['advantages_BL'] = batch_file.load_advantages(
        path, arrays['loss_mask_BL'], dtype=dtype
      )
  names = [name for name in lab.OPTIONAL_ARRAYS if name not in arrays]
  optional, problems = saved_batch.select_optional(loaded, names, dtype=dtype)
  for problem in problems:
    warning = f'--batch={flags.values["batch"]}: {problem}; left out'
    print(warning, file=sys.stderr)
  return arrays | optional


def _finish(
  flags: configuration.Flags,
  metrics: Mapping[str, float],
  arrays: Mapping[str, Any],
) -> int:
  """Writes the arrays to `--out`, if given, and prints the metrics."""
  metrics = _finite_metrics(flags, metrics)
  if flags.values['out']:
    _save(flags.values['out'], arrays)
  print(_json(metrics))
  return 0


def _finite_metrics(
  flags: configuration.Flags, metrics: Mapping[str, float], subject: str = ''
) -> dict[str, float]:
  """Returns the finite metrics, since JSON has no nan; warns of the others."""
  names = [name for name, x in metrics.items() if not math.isfinite(x)]
  if names:
    dtype = _dtype(flags).__name__
    warning = f'{subject}{", ".join(names)}: not finite in {dtype}; left out'
    print(warning, file=sys.stderr)
  return {name: x for name, x in metrics.items() if name not in names}


def _json(values) -> str:
  return json.dumps(values, allow_nan=False)


def _save(out: str, arrays: Mapping[str, Any]) -> None:
  from stppo_jax.rollout import batch_file

  with lab_flags.errors_name(f'--out={out}'):
    batch_file.save(out, arrays)
