"""Save a collection once, and recompute any row or estimator on it offline.

python -m stppo_jax lab collect --config=FILE.py[:ROW] --out=F.npz
    [--config.KEY=VALUE ...] [--workdir=DIR] [--updates=N]
python -m stppo_jax lab score --batch=F.npz --row=st_ppo [--out=O.npz]
    [--set KEY=VALUE ...] [--entropy_coefficient=X] [--float64]
python -m stppo_jax lab advantages --batch=F.npz --estimator=gae [--out=O.npz]
    [--set KEY=VALUE ...] [--float64]
python -m stppo_jax lab compare --batch=F.npz --rows=turn_ppo,st_ppo
    [--float64] [--json]

collect plays one collection, from the newest checkpoint of the run in DIR or
from the start, annotates it, makes N updates (default: those of one step) and
saves the arrays. The others need no model, run on CPU, and read any file with
the arrays they use, whoever wrote it. KEY is an option of the row, such as
correction.clipping_bias.tau, or of the estimator, such as gamma. score and
advantages print one JSON object. docs/lab.md has the arrays.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import copy
import dataclasses
import json
import math
import os
import pathlib

from ml_collections import config_dict

from configs import algorithms
from stppo_jax.commands import configuration


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
  errors = _missing(options, 'out') + _unwritable(options)
  if num_updates is not None and (
    type(num_updates) is not int or num_updates < 0
  ):
    errors.append(f'--updates={num_updates}: must be an integer, 0 or greater')
  _raise_if(errors)
  # Late, so that a wrong flag is answered before jax is imported.
  from stppo_jax.training import lab_collection

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
  flags = _split(argv, 'batch', 'row', out='', entropy_coefficient='0')
  values = flags.values
  errors = flags.errors
  if values['row']:
    errors = errors + _unknown_rows('row', values['row'])
  text = values['entropy_coefficient']
  try:
    coefficient = float(text)
  except ValueError:
    coefficient = math.nan
  if not math.isfinite(coefficient):
    errors.append(f'--entropy_coefficient={text}: must be a finite number')
  _raise_if(errors)
  row = _changed(
    'algorithm', algorithms.ALGORITHMS[values['row']], flags.lists['set']
  )
  with _on_cpu(flags):
    from stppo_jax.analysis import lab
    from stppo_jax.rl import algorithm as algorithm_lib

    with _naming('--set'):
      algorithm = algorithm_lib.build_algorithm(row)
    needs = lab.score_needs(algorithm, entropy_coefficient=coefficient)
    rollouts = _read(
      flags,
      lambda _: {name: values['row'] for name in sorted(needs)},
      lab.SCORE_USES,
    )
    found = lab.score(algorithm, rollouts, entropy_coefficient=coefficient)
  return _tell(flags, found)


def _advantages(argv: Sequence[str]) -> int:
  flags = _split(argv, 'batch', 'estimator', out='')
  name, table = flags.values['estimator'], algorithms.BLOCKS['advantage']
  errors = flags.errors
  if name and name not in table:
    choices = configuration.closest(name, list(table))
    errors.append(f'--estimator={name}: unknown estimator{choices}')
  _raise_if(errors)
  block = _changed(
    'algorithm.advantage',
    algorithms.block('advantage', name),
    flags.lists['set'],
  )
  with _on_cpu(flags):
    from stppo_jax.analysis import lab

    with _naming('--set'):
      estimator = lab.build_estimator(block)
    compares = estimator.name in algorithms.GROUP_ADVANTAGES

    def needs(arrays):
      found = lab.advantages_needs(estimator, arrays, compares=compares)
      return {array: estimator.name for array in sorted(found)}

    rollouts = _read(flags, needs, lab.ADVANTAGES_USES)
    batch = flags.values['batch']
    _raise_if(
      [
        f'--batch={batch}: {problem}'
        for problem in lab.estimate_problems(estimator, rollouts)
      ]
    )
    found = lab.estimate(estimator, rollouts)
  return _tell(flags, found)


def _compare(argv: Sequence[str]) -> int:
  flags = _split(argv, 'batch', 'rows', lists=(), switches=('json',))
  names = list(dict.fromkeys(flags.values['rows'].split(',')))
  errors = flags.errors
  if flags.values['rows']:
    errors = errors + _unknown_rows('rows', *names)
  _raise_if(errors)
  with _on_cpu(flags):
    from stppo_jax.analysis import comparison
    from stppo_jax.analysis import lab
    from stppo_jax.rl import algorithm as algorithm_lib

    rows = {
      name: algorithm_lib.build_algorithm(algorithms.ALGORITHMS[name])
      for name in names
    }
    needs = {
      array: name
      for name, row in reversed(rows.items())
      for array in sorted(lab.score_needs(row, entropy_coefficient=0.0))
    }
    rollouts = _read(flags, lambda _: needs, lab.SCORE_USES)
    found = comparison.compare(rows, rollouts)
  for metrics in found.rows.values():
    _check_finite(flags, metrics)
  if 'json' in flags.switches:
    print(_json({'rows': found.rows, 'cosines': found.cosines}))
  else:
    print(comparison.table(found))
  return 0


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
  'collect': _collect,
  'score': _score,
  'advantages': _advantages,
  'compare': _compare,
}


def _split(
  argv: Sequence[str],
  *needed: str,
  lists: Sequence[str] = ('set',),
  switches: Sequence[str] = (),
  **optional: str,
) -> configuration.Flags:
  """The flags of a command on a batch; `values` has all, the optional too."""
  flags = configuration.split(
    argv,
    (*needed, *optional),
    lists=lists,
    switches=('float64', *switches),
  )
  values = dict.fromkeys(needed, '') | optional | flags.values
  errors = flags.errors + _missing(values, *needed)
  if 'out' in optional:
    errors += _unwritable(values)
  return dataclasses.replace(flags, values=values, errors=errors)


def _missing(values, *names: str) -> list[str]:
  return [f'--{name}: missing' for name in names if not values[name]]


def _unknown_rows(flag: str, *names: str) -> list[str]:
  known = list(algorithms.ALGORITHMS)
  return [
    f'--{flag}={name}: unknown row' + configuration.closest(name, known)
    for name in names
    if name not in known
  ]


def _raise_if(errors: Sequence[str]) -> None:
  if errors:
    raise configuration.ConfigurationError(errors)


@contextlib.contextmanager
def _naming(subject: str) -> Iterator[None]:
  """Turns a ValueError into lines that name what is wrong."""
  try:
    yield
  except ValueError as error:
    lines = str(error).splitlines()
    raise configuration.ConfigurationError(
      [f'{subject}: {line}' for line in lines]
    ) from error


def _changed(block: str, defaults, changes: Sequence[str]):
  """The options of a block, changed by `--set KEY=VALUE`."""
  config = config_dict.ConfigDict()
  *outer, leaf = block.split('.')
  level = config
  for name in outer:
    level[name] = config_dict.ConfigDict()
    level = level[name]
  level[leaf] = config_dict.ConfigDict(copy.deepcopy(defaults))
  pairs, errors = {}, []
  for change in changes:
    key, equals, text = change.partition('=')
    if key and equals:
      pairs[key] = text
    else:
      errors.append(f'--set {change}: expected KEY=VALUE')
  errors += configuration.override_all(
    config, pairs.items(), flag='--set ', block=block
  )
  _raise_if(errors)
  return level[leaf]


@contextlib.contextmanager
def _on_cpu(flags: configuration.Flags) -> Iterator[None]:
  """jax on CPU, in the precision asked for; imported here at the earliest."""
  os.environ['JAX_PLATFORMS'] = 'cpu'
  import jax

  with jax.enable_x64('float64' in flags.switches):
    yield


def _read(flags: configuration.Flags, needs, uses):
  """The arrays of `--batch` that are needed or used; see `frozen.select`.

  Args:
    flags: of the command.
    needs: from the loaded arrays to what must be there, and who reads it.
    uses: what is read if it is there.
  """
  import numpy as np

  from stppo_jax.analysis import frozen

  path = flags.values['batch']
  dtype = np.float64 if 'float64' in flags.switches else np.float32
  with _naming(f'--batch={path}'):
    try:
      arrays = frozen.load(path)
    except OSError as error:
      raise ValueError(error.strerror) from error
    return frozen.select(arrays, needs(arrays), uses, dtype=dtype)


def _tell(flags: configuration.Flags, found) -> int:
  """Writes the arrays where they are wanted, prints the metrics."""
  _check_finite(flags, found.metrics)
  if flags.values['out']:
    _save(flags.values['out'], found.arrays)
  print(_json(found.metrics))
  return 0


def _check_finite(flags: configuration.Flags, metrics) -> None:
  """What is computed from finite numbers may still be too large for them."""
  names = [name for name, x in metrics.items() if not math.isfinite(x)]
  if names:
    kind = 'float64' if 'float64' in flags.switches else 'float32'
    _raise_if(
      [f'{", ".join(names)}: not finite in {kind}, for too large numbers']
    )


def _json(values) -> str:
  return json.dumps(values, allow_nan=False)


def _unwritable(values) -> list[str]:
  """Why `--out` cannot be there; before anything is computed for it."""
  out = values['out']
  path = pathlib.Path(out)
  if out and (path.is_dir() or not path.parent.is_dir()):
    return [f'--out={out}: a folder, or in a folder that does not exist']
  if out and 'batch' in values and path.resolve() == _resolved(values):
    return [f'--out={out}: is the file of --batch']
  return []


def _resolved(values) -> pathlib.Path:
  return pathlib.Path(values['batch']).resolve()


def _save(out: str, arrays) -> None:
  from stppo_jax.analysis import frozen

  try:
    frozen.save(out, arrays)
  except OSError as error:
    raise configuration.ConfigurationError(
      [f'--out={out}: {error.strerror}']
    ) from error
