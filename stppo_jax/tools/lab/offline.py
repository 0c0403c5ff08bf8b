"""Computes algorithms and estimators on a saved batch, on CPU, and prints them.

Every function raises `Misconfigured` for files and options that do not fit; the
lines name the flags of the command `lab`.
"""

from collections.abc import Mapping
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
from stppo_jax.tools.lab import options as options_lib
from stppo_jax.tools.lab import saved_batch
from stppo_jax.tools.lab import token_changes
from stppo_jax.tools.lab import values as values_lib

_NOT_FINITE = (saved_batch.NotFinite,)


def score(
  source: options_lib.Source,
  name: str,
  options: options_lib.Options,
  *,
  entropy_coefficient: float,
  out: str,
) -> None:
  """Prints the metrics of an algorithm and writes its loss and gradient.

  Args:
    source: the saved batch.
    name: the name of the algorithm.
    options: its options.
    entropy_coefficient: the weight of the entropy bonus.
    out: the file to write; '' for none.
  """
  with jax.enable_x64(source.is_double):
    algorithm = options.build(algorithm_lib.build_algorithm)
    required = lab.required_arrays(
      algorithm, entropy_coefficient=entropy_coefficient
    )
    arrays = _load(source, dict.fromkeys(sorted(required), name))
    with exits.naming(f'--algorithm={name}', _NOT_FINITE):
      found = lab.loss_and_gradient(
        algorithm, arrays, entropy_coefficient=entropy_coefficient
      )
  _finish(source, found.metrics, found.arrays, out)


def advantages(
  source: options_lib.Source,
  options: options_lib.Options,
  *,
  kl: str,
  kl_coefficient: float | None,
  out: str,
) -> None:
  """Prints the metrics of an estimator and writes advantages and returns.

  Args:
    source: the saved batch.
    options: the options of the estimator.
    kl: the KL estimate to subtract from the rewards; '' for none.
    kl_coefficient: times this; None: the coefficient of the file.
    out: the file to write; '' for none.
  """
  with jax.enable_x64(source.is_double):
    estimator = options.build(estimates.build_estimator)
    with exits.naming(f'--batch={source.batch}'):
      loaded = saved_batch.load(source.batch)
    required = estimates.required_arrays(estimator, loaded)
    readers = {name: str(estimator.name) for name in sorted(required)}
    if kl:
      with exits.naming(f'--kl={kl}'):
        estimates.check_penalty(estimator, kl)
      readers |= dict.fromkeys(estimates.PENALTY_ARRAYS, '--kl')
      if kl_coefficient is None:
        readers['kl_coefficient'] = '--kl without --kl_coefficient'
    with exits.naming(f'--batch={source.batch}'):
      arrays = saved_batch.select(loaded, readers, dtype=source.dtype)
      estimates.check(estimator, arrays)
    if kl:
      if kl_coefficient is None:
        kl_coefficient = float(arrays['kl_coefficient'])
      arrays = estimates.penalized(
        arrays, estimator=kl, coefficient=kl_coefficient
      )
    with exits.naming(f'--estimator={estimator.name}', _NOT_FINITE):
      estimate = estimates.estimate(estimator, arrays)
  _finish(source, estimate.metrics, estimate.arrays, out)


def compare(
  source: options_lib.Source,
  options: Mapping[str, options_lib.Options],
  *,
  as_json: bool,
  plot: str,
) -> None:
  """Prints several algorithms beside each other.

  Args:
    source: the saved batch.
    options: label to the options of an algorithm.
    as_json: whether to print all metrics as JSON.
    plot: the picture to write; '' for none.
  """
  with jax.enable_x64(source.is_double):
    compared, arrays = _read(source, options)
    with exits.naming('--algorithms', _NOT_FINITE):
      result = comparison.compare(compared, arrays)
      found = token_changes.measure(compared, arrays) if plot else {}
  if plot:
    # Late, because it loads the library that draws.
    from stppo_jax.tools.lab import pictures

    with exits.naming(f'--plot={plot}'):
      pictures.save(pictures.comparison_page(result, found), plot)
  if as_json:
    metrics = {
      label: _finite(source, metrics, f'{label}: ')
      for label, metrics in result.metrics.items()
    }
    # The key was 'rows' before algorithms were called so; scripts read it.
    print(_json({'rows': metrics, 'cosines': result.cosines}))
  else:
    print(comparison.table(result))


def levels(
  source: options_lib.Source,
  options: Mapping[str, options_lib.Options],
  *,
  plot: str,
) -> None:
  """Prints the ratios at every level, and the bounds of algorithms.

  Args:
    source: the saved batch.
    options: label to the options of an algorithm.
    plot: the picture to write; '' for none.
  """
  with jax.enable_x64(source.is_double):
    compared, arrays = _read(source, options)
    with exits.naming('--algorithms', _NOT_FINITE):
      result = levels_lib.measure(compared, arrays)
  if plot:
    from stppo_jax.tools.lab import pictures

    with exits.naming(f'--plot={plot}'):
      pictures.save(pictures.levels_page(result), plot)
  print(levels_lib.table(result))


def values(source: options_lib.Source, *, as_json: bool, plot: str) -> None:
  """Prints a critic and all estimators against sampled values.

  Args:
    source: the saved batch, with sampled values.
    as_json: whether to print the figures as JSON.
    plot: the picture to write; '' for none.
  """
  with (
    jax.enable_x64(source.is_double),
    exits.naming(f'--batch={source.batch}'),
  ):
    loaded = saved_batch.load(source.batch)
    values_lib.check(loaded)
    critic = [name for name in ('old_values_BL',) if name in loaded]
    names = (*values_lib.ARRAYS, *critic)
    readers = {name: 'lab values' for name in names}
    arrays = saved_batch.select(loaded, readers, dtype=source.dtype)
    by_turn = values_lib.values(arrays)
    correlated = values_lib.correlations(arrays, _estimated(source, loaded))
  if plot:
    from stppo_jax.tools.lab import pictures

    with exits.naming(f'--plot={plot}'):
      pictures.save(pictures.values_page(arrays, correlated), plot)
  if as_json:
    print(values_lib.as_json(by_turn, correlated))
  else:
    print(values_lib.table(by_turn, correlated))


def _estimated(
  source: options_lib.Source, loaded: saved_batch.Arrays
) -> dict[str, np.ndarray]:
  """Returns the advantages of each estimator that a file is enough for."""
  advantages, missing = {}, []
  for name in defaults.DEFAULTS['advantage']:
    estimator = estimates.build_estimator(defaults.choice('advantage', name))
    required = estimates.required_arrays(estimator, loaded)
    readers = {array: name for array in sorted(required)}
    try:
      arrays = saved_batch.select(loaded, readers, dtype=source.dtype)
      estimates.check(estimator, arrays)
      found = estimates.estimate(estimator, arrays)
    except ValueError:
      missing.append(name)
    else:
      advantages[name] = found.arrays['advantages_BL']
  if missing:
    print(
      f'--batch={source.batch}: lacks what {", ".join(missing)} read; left out '
      '(lab advantages --estimator=NAME says why)',
      file=sys.stderr,
    )
  return advantages


def _read(
  source: options_lib.Source, options: Mapping[str, options_lib.Options]
) -> tuple[dict[str, algorithm_lib.Algorithm], dict[str, np.ndarray]]:
  """Returns the algorithms by label, and the arrays that they read."""
  algorithms = {
    label: chosen.build(algorithm_lib.build_algorithm)
    for label, chosen in options.items()
  }
  # A missing array is reported for the first algorithm that reads it.
  readers = {
    array: label
    for label, algorithm in reversed(algorithms.items())
    for array in sorted(lab.required_arrays(algorithm, entropy_coefficient=0.0))
  }
  return algorithms, _load(source, readers)


def _load(
  source: options_lib.Source, readers: Mapping[str, str]
) -> dict[str, np.ndarray]:
  """Returns the checked arrays that algorithms are computed on.

  Optional arrays only add metrics; one that is not valid is left out, with a
  warning.

  Args:
    source: the saved batch.
    readers: name of each required array to the algorithm that reads it.
  """
  dtype, path = source.dtype, source.advantages
  readers = dict(readers)
  if path:
    readers.pop('advantages_BL', None)
  with exits.naming(f'--batch={source.batch}'):
    loaded = saved_batch.load(source.batch)
    arrays = dict(saved_batch.select(loaded, readers, dtype=dtype))
  if path:
    with exits.naming(f'--advantages={path}'):
      arrays['advantages_BL'] = saved_batch.load_advantages(
        path, arrays['loss_mask_BL'], dtype=dtype
      )
  names = [name for name in lab.OPTIONAL_ARRAYS if name not in arrays]
  optional, problems = saved_batch.select_optional(loaded, names, dtype=dtype)
  for problem in problems:
    print(f'--batch={source.batch}: {problem}; left out', file=sys.stderr)
  return arrays | dict(optional)


def _finish(
  source: options_lib.Source,
  metrics: Mapping[str, float],
  arrays: Mapping[str, Any],
  out: str,
) -> None:
  """Writes the arrays, if wanted, and prints the metrics."""
  metrics = _finite(source, metrics)
  if out:
    with exits.naming(f'--out={out}'):
      batch_file.save(out, arrays)
  print(_json(metrics))


def _finite(
  source: options_lib.Source, metrics: Mapping[str, float], subject: str = ''
) -> dict[str, float]:
  """Returns the finite metrics, since JSON has no nan; warns of the others."""
  names = [name for name, x in metrics.items() if not math.isfinite(x)]
  if names:
    dtype = source.dtype.__name__
    warning = f'{subject}{", ".join(names)}: not finite in {dtype}; left out'
    print(warning, file=sys.stderr)
  return {name: x for name, x in metrics.items() if name not in names}


def _json(values) -> str:
  return json.dumps(values, allow_nan=False)
