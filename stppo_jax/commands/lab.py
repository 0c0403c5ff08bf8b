"""Save a collection once, and recompute any row or estimator on it offline.

python -m stppo_jax lab collect --config=FILE.py[:ROW] --out=F.npz
    [--config.KEY=VALUE ...] [--workdir=DIR] [--updates=N]
python -m stppo_jax lab score --batch=F.npz --row=st_ppo [--out=O.npz]
    [--config=FILE.py[:ROW]] [--set KEY=VALUE ...] [--advantages=A.npz]
    [--entropy_coefficient=X] [--float64]
python -m stppo_jax lab advantages --batch=F.npz --estimator=gae [--out=A.npz]
    [--config=FILE.py[:ROW]] [--set KEY=VALUE ...]
    [--kl=k1 [--kl_coefficient=X]] [--float64]
python -m stppo_jax lab compare --batch=F.npz --rows=ROW[:KEY=VALUE ...],...
    [--config=FILE.py] [--advantages=A.npz] [--float64] [--json]

collect plays one collection, from the newest checkpoint of the run in DIR or
from the start, annotates it, makes N updates (default: those of one step) and
saves the arrays. The others need no model, run on CPU, and read any file with
the arrays they use, whoever wrote it. KEY is an option of the row, such as
correction.clipping_bias.tau, or of the estimator, such as gamma. Options are
those of the table, or with --config those of a run of that file. score and
advantages print one JSON object. docs/lab.md has the arrays.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import json
import math
import os
import sys

from stppo_jax.commands import configuration
from stppo_jax.commands import lab_algorithms
from stppo_jax.commands import lab_flags
from stppo_jax.configs import algorithms


def main(argv: Sequence[str]) -> int:
  if not argv or argv[0] not in _COMMANDS:
    name = argv[0] if argv else ''
    problem = f'lab {name}: unknown command' if name else 'lab: no command'
    choices = configuration.closest(name, list(_COMMANDS))
    raise configuration.ConfigurationError([problem + choices])
  return _COMMANDS[argv[0]](argv[1:])


def _collect(argv: Sequence[str]) -> int:
  arguments = configuration.parse(
    argv, workdir=False, options={'out': '', 'workdir': '', 'updates': None}
  )
  options = arguments.options
  num_updates = options['updates']
  errors = [] if options['out'] else ['--out: missing']
  errors += lab_flags.unwritable(options)
  if num_updates is not None and (
    type(num_updates) is not int or num_updates < 0
  ):
    errors.append(f'--updates={num_updates}: must be an integer, 0 or greater')
  lab_flags.raise_if(errors)
  # Late, so that a wrong flag is answered before jax is imported.
  from stppo_jax.analysis import lab_collection

  arrays = lab_collection.collect(
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
  flags = lab_flags.split(
    argv,
    ('batch', 'row'),
    ('out', 'config', 'advantages', 'entropy_coefficient'),
  )
  values = flags.values
  lab_flags.raise_if(flags.errors)
  coefficient = lab_flags.number(flags, 'entropy_coefficient') or 0.0
  options = lab_algorithms.row(
    values['row'], flags.lists['set'], config=values['config']
  )
  with _on_cpu(flags):
    from stppo_jax.analysis import lab
    from stppo_jax.analysis import saved_batch
    from stppo_jax.rl import algorithm as algorithm_lib

    row = options.build(algorithm_lib.build_algorithm)
    needs = lab.required_arrays(row, entropy_coefficient=coefficient)
    rollouts = _scored(flags, dict.fromkeys(sorted(needs), values['row']))
    with lab_flags.naming(f'--row={values["row"]}', (saved_batch.NotFinite,)):
      found = lab.score(row, rollouts, entropy_coefficient=coefficient)
  return _tell(flags, found)


def _advantages(argv: Sequence[str]) -> int:
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
    from stppo_jax.analysis import estimates
    from stppo_jax.analysis import saved_batch

    estimator = options.build(estimates.build_estimator)
    arrays = _load(flags)
    needs = estimates.required_arrays(
      estimator,
      arrays,
      compares=estimator.name in algorithms.GROUP_ADVANTAGES,
    )
    readers = dict.fromkeys(sorted(needs), estimator.name)
    if values['kl']:
      with lab_flags.naming(f'--kl={values["kl"]}'):
        estimates.check_penalty(estimator, values['kl'])
      readers |= dict.fromkeys(estimates.PENALTY_ARRAYS, '--kl')
      if coefficient is None:
        readers['kl_coefficient'] = '--kl without --kl_coefficient'
    with _naming_batch(flags):
      rollouts = saved_batch.select(arrays, readers, dtype=_dtype(flags))
      estimates.check(estimator, rollouts)
    if values['kl']:
      if coefficient is None:
        coefficient = float(rollouts['kl_coefficient'])
      rollouts = estimates.penalized(
        rollouts, estimator=values['kl'], coefficient=coefficient
      )
    with lab_flags.naming(
      f'--estimator={estimator.name}', (saved_batch.NotFinite,)
    ):
      found = estimates.estimate(estimator, rollouts)
  return _tell(flags, found)


def _compare(argv: Sequence[str]) -> int:
  flags = lab_flags.split(
    argv, ('batch', 'rows'), ('config', 'advantages'), lists=(),
    switches=('json',),
  )  # fmt: skip
  options, errors = {}, list(flags.errors)
  labels = lab_algorithms.labels(flags.values['rows'])
  for label in labels if flags.values['rows'] else ():
    try:
      config = flags.values['config']
      options[label] = lab_algorithms.labelled(label, config=config)
    except configuration.ConfigurationError as error:
      errors += error.lines
  lab_flags.raise_if(errors)
  with _on_cpu(flags):
    from stppo_jax.analysis import comparison
    from stppo_jax.analysis import lab
    from stppo_jax.analysis import saved_batch
    from stppo_jax.rl import algorithm as algorithm_lib

    rows = {
      label: row.build(algorithm_lib.build_algorithm)
      for label, row in options.items()
    }
    readers = {
      array: label
      for label, row in reversed(rows.items())
      for array in sorted(lab.required_arrays(row, entropy_coefficient=0.0))
    }
    rollouts = _scored(flags, readers)
    with lab_flags.naming('--rows', (saved_batch.NotFinite,)):
      found = comparison.compare(rows, rollouts)
  if 'json' in flags.switches:
    metrics = {
      label: _finite(flags, metrics, f'{label}: ')
      for label, metrics in found.rows.items()
    }
    print(_json({'rows': metrics, 'cosines': found.cosines}))
  else:
    print(comparison.table(found))
  return 0


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
  'collect': _collect,
  'score': _score,
  'advantages': _advantages,
  'compare': _compare,
}


@contextlib.contextmanager
def _on_cpu(flags: configuration.Flags) -> Iterator[None]:
  """jax on CPU, in the precision asked for; imported here at the earliest."""
  os.environ['JAX_PLATFORMS'] = 'cpu'
  import jax

  with jax.enable_x64('float64' in flags.switches):
    yield


def _dtype(flags: configuration.Flags):
  import numpy as np

  return np.float64 if 'float64' in flags.switches else np.float32


def _naming_batch(flags: configuration.Flags):
  return lab_flags.naming(f'--batch={flags.values["batch"]}')


def _load(flags: configuration.Flags):
  """The arrays of `--batch` as they are."""
  from stppo_jax.analysis import batch_file

  with _naming_batch(flags):
    return batch_file.load(flags.values['batch'])


def _scored(flags: configuration.Flags, readers):
  """What rows are scored on.

  Args:
    flags: of the command.
    readers: names of the arrays that must be there, to the row that reads it.
      Others may say more; one that is not sound is told of and left out.
  """
  from stppo_jax.analysis import batch_file
  from stppo_jax.analysis import lab
  from stppo_jax.analysis import saved_batch

  arrays, dtype = _load(flags), _dtype(flags)
  path = flags.values['advantages']
  if path:
    readers = {n: row for n, row in readers.items() if n != 'advantages_BL'}
  with _naming_batch(flags):
    rollouts = saved_batch.select(arrays, readers, dtype=dtype)
  if path:
    with lab_flags.naming(f'--advantages={path}'):
      rollouts['advantages_BL'] = batch_file.load_advantages(
        path, rollouts['loss_mask_BL'], dtype=dtype
      )
  uses = [name for name in lab.OPTIONAL_ARRAYS if name not in rollouts]
  more, problems = saved_batch.select_optional(arrays, uses, dtype=dtype)
  for problem in problems:
    left_out = f'--batch={flags.values["batch"]}: {problem}; left out'
    print(left_out, file=sys.stderr)
  return rollouts | more


def _tell(flags: configuration.Flags, found) -> int:
  """Writes the arrays where they are wanted, prints the metrics."""
  metrics = _finite(flags, found.metrics)
  if flags.values['out']:
    _save(flags.values['out'], found.arrays)
  print(_json(metrics))
  return 0


def _finite(flags: configuration.Flags, metrics, subject: str = ''):
  """Without the diagnostics that are too large; JSON has no name for them."""
  names = [name for name, x in metrics.items() if not math.isfinite(x)]
  if names:
    kind = _dtype(flags).__name__
    told = f'{subject}{", ".join(names)}: not finite in {kind}; left out'
    print(told, file=sys.stderr)
  return {name: x for name, x in metrics.items() if name not in names}


def _json(values) -> str:
  return json.dumps(values, allow_nan=False)


def _save(out: str, arrays) -> None:
  from stppo_jax.analysis import batch_file

  with lab_flags.naming(f'--out={out}'):
    batch_file.save(out, arrays)
