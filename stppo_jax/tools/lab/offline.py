"""Computes losses and advantages on a saved batch, and prints the results.

Everything is computed on CPU. Every public function is a command of `lab`. Its
arguments are the flags of the command, and options. The options of an algorithm
or an estimator are a tuple: the flag that names the algorithm or estimator, the
section of a config that describes it, and a mapping from keys of this section
to the flags that have set them. If a file or an option does not fit, the
function raises `Misconfigured`.
"""

from collections.abc import Callable, Mapping
import json
import math
import sys
from typing import Any

import jax
import numpy as np

from stppo_jax import exits
from stppo_jax.configs import defaults
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rollout import batch_file
from stppo_jax.tools.lab import comparison
from stppo_jax.tools.lab import estimates
from stppo_jax.tools.lab import lab
from stppo_jax.tools.lab import levels as levels_lib
from stppo_jax.tools.lab import saved_batch
from stppo_jax.tools.lab import token_changes
from stppo_jax.tools.lab import values as values_lib

_NOT_FINITE = (saved_batch.NotFinite,)
# The value of --advantages that gives each algorithm the advantages of its own
# estimator.
OWN = 'own'
_Options = tuple[str, Any, Mapping[str, str]]


def score(flags: Any, options: _Options) -> None:
  """Prints the metrics of an algorithm and writes its loss and gradient."""
  name, coefficient = flags.algorithm, flags.entropy_coefficient
  # The whole computation is inside this context. Outside of it, jit would
  # silently round float64 arrays to float32.
  with jax.enable_x64(flags.float64):
    algorithm = _build(algorithm_lib.build_algorithm, options)
    loaded = _load(flags, {name: algorithm}, entropy_coefficient=coefficient)
    _, arrays = loaded[name]
    with exits.naming(f'--algorithm={name}', _NOT_FINITE):
      found = lab.loss_and_gradient(
        algorithm, arrays, entropy_coefficient=coefficient
      )
  _finish(flags, found)


def advantages(flags: Any, options: _Options) -> None:
  """Prints an estimator's metrics; writes the advantages and the returns."""
  kl, kl_coefficient = flags.kl, flags.kl_coefficient
  with jax.enable_x64(flags.float64):
    estimator = _build(estimates.build_estimator, options)
    with exits.naming(f'--batch={flags.batch}'):
      loaded = saved_batch.load(flags.batch)
    required = estimates.required_arrays(estimator)
    readers = {name: str(estimator.name) for name in sorted(required)}
    if kl:
      with exits.naming(f'--kl={kl}'):
        estimates.check_penalty(estimator, kl)
      readers |= dict.fromkeys(estimates.PENALTY_ARRAYS, '--kl')
      if kl_coefficient is None:
        readers['kl_coefficient'] = '--kl without --kl_coefficient'
    with exits.naming(f'--batch={flags.batch}'):
      arrays = saved_batch.select(loaded, readers, dtype=_dtype(flags))
      estimates.check(estimator, arrays)
    if kl:
      if kl_coefficient is None:
        kl_coefficient = float(arrays['kl_coefficient'])
      arrays = estimates.penalized(
        arrays, estimator=kl, coefficient=kl_coefficient
      )
    with exits.naming(f'--estimator={estimator.name}', _NOT_FINITE):
      found = estimates.estimate(estimator, arrays)
  _finish(flags, found)


def _own_advantages(
  flags: Any,
  label: str,
  algorithm: algorithm_lib.Algorithm,
  loaded: saved_batch.Arrays,
) -> np.ndarray:
  """Returns the advantages that an algorithm's own estimator computes."""
  estimator: Any = algorithm.advantage
  required = estimates.required_arrays(estimator)
  is_penalized = algorithm.kl.where == 'reward'
  if is_penalized:
    required |= set(estimates.PENALTY_ARRAYS)
  readers = {name: f'the estimator of {label}' for name in sorted(required)}
  with exits.naming(f'--batch={flags.batch}'):
    arrays = saved_batch.select(loaded, readers, dtype=_dtype(flags))
    estimates.check(estimator, arrays)
  if is_penalized:
    arrays = estimates.penalized(
      arrays,
      estimator=algorithm.kl.estimator,
      coefficient=float(algorithm.kl.coefficient),
    )
  with exits.naming(f'--advantages={OWN}: {label}', _NOT_FINITE):
    found = estimates.estimate(estimator, arrays)
  return found.arrays['advantages_BL']


def compare(flags: Any, options: Mapping[str, _Options]) -> None:
  """Prints a comparison of several algorithms, which are given by label."""
  with jax.enable_x64(flags.float64):
    compared = _read(flags, options)
    with exits.naming('--algorithms', _NOT_FINITE):
      result = comparison.compare(compared)
      found = token_changes.measure(compared) if flags.plot else {}
  _draw(flags, 'comparison_page', result, found)
  if flags.json:
    metrics = {
      label: _finite(flags, metrics, f'{label}: ')
      for label, metrics in result.metrics.items()
    }
    # The key 'rows' has the metrics of the algorithms. It keeps this old name,
    # because scripts read it.
    print(_json({'rows': metrics, 'cosines': result.cosines}))
  else:
    own = flags.advantages == OWN
    print(comparison.table(result, own_advantages=own))


def levels(flags: Any, options: Mapping[str, _Options]) -> None:
  """Prints the ratios at every level, and the bounds of algorithms."""
  with jax.enable_x64(flags.float64):
    compared = _read(flags, options)
    with exits.naming('--algorithms', _NOT_FINITE):
      result = levels_lib.measure(compared)
  _draw(flags, 'levels_page', result)
  print(levels_lib.table(result))


def values(flags: Any, options: None) -> None:
  """Prints how well a critic and all estimators agree with sampled values."""
  del options
  with jax.enable_x64(flags.float64), exits.naming(f'--batch={flags.batch}'):
    loaded = saved_batch.load(flags.batch)
    values_lib.check(loaded)
    critic = [name for name in ('old_values_BL',) if name in loaded]
    names = (*values_lib.ARRAYS, *critic)
    readers = {name: 'lab values' for name in names}
    arrays = saved_batch.select(loaded, readers, dtype=_dtype(flags))
    by_turn = values_lib.values(arrays)
    correlated = values_lib.correlations(arrays, _estimated(flags, loaded))
  _draw(flags, 'values_page', arrays, correlated)
  if flags.json:
    print(values_lib.as_json(by_turn, correlated))
  else:
    print(values_lib.table(by_turn, correlated))


def _estimated(flags: Any, loaded: saved_batch.Arrays) -> dict[str, np.ndarray]:
  """Returns the advantages of each estimator, by the estimator's name.

  An estimator that cannot be computed on the loaded arrays is left out, and a
  message is printed.
  """
  advantages, missing = {}, []
  for name in defaults.DEFAULTS['advantage']:
    estimator = estimates.build_estimator(defaults.choice('advantage', name))
    required = estimates.required_arrays(estimator)
    readers = {array: name for array in sorted(required)}
    try:
      arrays = saved_batch.select(loaded, readers, dtype=_dtype(flags))
      estimates.check(estimator, arrays)
      found = estimates.estimate(estimator, arrays)
    # A file may lack an array that only some estimators need. So an error of
    # one estimator does not end the command.
    except ValueError:
      missing.append(name)
    else:
      advantages[name] = found.arrays['advantages_BL']
  if missing:
    print(
      f'--batch={flags.batch}: advantages of {", ".join(missing)} cannot be '
      'computed and are left out; lab advantages --estimator=NAME says why',
      file=sys.stderr,
    )
  return advantages


def _draw(flags: Any, page: str, *contents: Any) -> None:
  """Saves a picture if the flag `--plot` is set.

  Args:
    flags: the flags of the command.
    page: the name of the function of `pictures` that draws the picture.
    *contents: the arguments of this function.
  """
  if flags.plot:
    # These imports load matplotlib, which takes time.
    from stppo_jax.records import plots
    from stppo_jax.tools.lab import pictures

    with exits.naming(f'--plot={flags.plot}'):
      plots.save(getattr(pictures, page)(*contents), flags.plot, dpi=110)


def _build(make: Callable[[Any], Any], options: _Options) -> Any:
  """Returns the object that `make` builds from the values of the options.

  Raises:
    Misconfigured: `make` refuses a value; the message names its flag.
  """
  subject, values, typed = options
  try:
    return make(values)
  except ValueError as error:
    lines = []
    for line in str(error).splitlines():
      # A line begins with the section and its key, such as algorithm.kl.where.
      key, _, problem = line.partition(': ')
      flag = typed.get(key.partition('=')[0].partition('.')[2])
      lines.append(f'{flag}: {problem}' if flag else f'{subject}: {line}')
    raise exits.Misconfigured('\n'.join(lines)) from error


def _dtype(flags: Any) -> type[np.floating]:
  """Returns the dtype of the computation."""
  return np.float64 if flags.float64 else np.float32


def _read(flags: Any, options: Mapping[str, _Options]) -> comparison.Compared:
  """Returns the algorithms by label, each with the arrays that it reads."""
  algorithms = {
    label: _build(algorithm_lib.build_algorithm, chosen)
    for label, chosen in options.items()
  }
  return _load(flags, algorithms, entropy_coefficient=0.0)


def _load(
  flags: Any,
  algorithms: dict[str, algorithm_lib.Algorithm],
  *,
  entropy_coefficient: float,
) -> comparison.Compared:
  """Returns each algorithm with the checked arrays on which it is computed.

  Optional arrays only add metrics. An optional array that is not valid is left
  out, and a warning is printed.

  Args:
    flags: the flags of the command.
    algorithms: the algorithms by label.
    entropy_coefficient: see `lab.required_arrays`.
  """
  # A missing array is reported for the first algorithm that reads it.
  readers = {
    array: label
    for label, algorithm in reversed(algorithms.items())
    for array in sorted(
      lab.required_arrays(algorithm, entropy_coefficient=entropy_coefficient)
    )
  }
  dtype, path = _dtype(flags), flags.advantages
  if path:
    # The advantages come from another file or from estimators, so the batch
    # does not need them.
    readers.pop('advantages_BL', None)
  with exits.naming(f'--batch={flags.batch}'):
    loaded = saved_batch.load(flags.batch)
    arrays = saved_batch.select(loaded, readers, dtype=dtype)
  if path and path != OWN:
    with exits.naming(f'--advantages={path}'):
      arrays['advantages_BL'] = saved_batch.load_advantages(
        path, arrays['loss_mask_BL'], dtype=dtype
      )
  names = [name for name in lab.OPTIONAL_ARRAYS if name not in arrays]
  # Optional arrays are checked apart from the required arrays, because an error
  # in an optional array must only cost some metrics and not end the command.
  optional, problems = saved_batch.select_optional(loaded, names, dtype=dtype)
  for problem in problems:
    print(f'--batch={flags.batch}: {problem}; array left out', file=sys.stderr)
  arrays |= optional
  if path != OWN:
    return {label: (x, arrays) for label, x in algorithms.items()}
  return {
    label: (
      x,
      arrays | {'advantages_BL': _own_advantages(flags, label, x, loaded)},
    )
    for label, x in algorithms.items()
  }


def _finish(flags: Any, found: saved_batch.Result) -> None:
  """Writes the arrays if the flag --out is set, and prints the metrics."""
  metrics = _finite(flags, found.metrics)
  if flags.out:
    with exits.naming(f'--out={flags.out}'):
      batch_file.save(flags.out, found.arrays)
  print(_json(metrics))


def _finite(
  flags: Any, metrics: Mapping[str, float], subject: str = ''
) -> dict[str, float]:
  """Returns the finite metrics; prints a warning about all other metrics."""
  names = [name for name, x in metrics.items() if not math.isfinite(x)]
  if names:
    dtype = _dtype(flags).__name__
    warning = f'{subject}{", ".join(names)}: not finite in {dtype}; left out'
    print(warning, file=sys.stderr)
  return {name: x for name, x in metrics.items() if name not in names}


def _json(values) -> str:
  return json.dumps(values, allow_nan=False)
