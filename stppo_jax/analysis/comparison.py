"""Rows side by side on the same frozen rollouts.

B trajectories, L tokens. How far two rows agree is the cosine between their
gradients with respect to logprobs_BL; what a row leaves out is the share of
policy tokens it silences: those whose gradient is exactly 0 although they have
an advantage.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import typing

import numpy as np

from stppo_jax.analysis import lab
from stppo_jax.analysis import saved_batch
from stppo_jax.rl import algorithm as algorithm_lib

SILENCED = 'silenced'


class Comparison(typing.NamedTuple):
  """Rows by what they are called: a row may come with several settings.

  Attributes:
    rows: of each the metrics of `lab.score`, and `silenced`.
    cosines: of each pair; 0 where a gradient is 0 everywhere.
    levels: of each the level of its ratio.
  """

  rows: dict[str, dict[str, float]]
  cosines: dict[str, dict[str, float]]
  levels: dict[str, str]


def compare(
  algorithms: Mapping[str, algorithm_lib.Algorithm],
  rollouts: saved_batch.Arrays,
) -> Comparison:
  """Scores every row, without an entropy bonus.

  Args:
    algorithms: the rows, by what they shall be called.
    rollouts: from `frozen.select`, with what `lab.score_needs` names for each.

  Raises:
    frozen.NotFinite: what a row makes of them is too large for the precision;
      the message begins with its name.
  """
  rows, units = {}, {}
  for name, algorithm in algorithms.items():
    try:
      score = lab.score(algorithm, rollouts, entropy_coefficient=0.0)
    except saved_batch.NotFinite as error:
      raise saved_batch.NotFinite(f'{name}: {error}') from error
    gradient_BL = score.arrays['dloss_dlogprobs_BL'].astype(np.float64)
    share = _silenced(gradient_BL, rollouts)
    rows[name] = score.metrics | {SILENCED: share}
    units[name] = _unit(gradient_BL)
  cosines = {
    a: {b: float(np.vdot(units[a], units[b])) for b in units} for a in units
  }
  levels = {name: row.ratio.level for name, row in algorithms.items()}
  return Comparison(rows, cosines, levels)


def _silenced(gradient_BL, rollouts) -> float:
  mask_BL = rollouts['loss_mask_BL']
  silent_BL = (gradient_BL == 0) & (rollouts['advantages_BL'] != 0) & mask_BL
  return float(silent_BL.sum() / max(mask_BL.sum(), 1))


def _unit(x: np.ndarray) -> np.ndarray:
  """x / |x|, and 0 where x is. Scaled first: a square may underflow."""
  largest = np.abs(x).max(initial=0.0)
  if not largest:
    return x
  x = x / largest
  return x / np.linalg.norm(x)


def table(comparison: Comparison) -> str:
  """Two tables as text: a line for each row, and the matrix of the cosines."""
  head = ('row', 'loss', 'grad norm', 'cut', 'below', 'above', SILENCED)
  lines = [head]
  for name, metrics in comparison.rows.items():
    band = f'clipfrac/{comparison.levels[name]}'
    shares = (
      metrics['actor/pg_clipfrac'],
      metrics[f'{band}/low'],
      metrics[f'{band}/high'],
      metrics[SILENCED],
    )
    numbers = metrics['loss'], metrics['actor/grad_norm']
    lines.append(
      (name, *(f'{x:.6g}' for x in numbers), *(f'{x:.2%}' for x in shares))
    )
  names = list(comparison.rows)
  matrix = [('cosine', *names)]
  for a in names:
    cosines = (comparison.cosines[a][b] for b in names)
    matrix.append((a, *(f'{x:.4f}' for x in cosines)))
  return (
    f'{_aligned(lines)}\n'
    'cut: tokens whose gradient the objective cut; below, above: tokens '
    "outside the band\nat the row's level; silenced: policy tokens with an "
    f'advantage and without a gradient\n\n{_aligned(matrix)}'
  )


def _aligned(lines: Sequence[Sequence[str]]) -> str:
  """Columns; the first to the left, numbers to the right."""
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return '\n'.join(
    '  '.join(
      cell.rjust(width) if n else cell.ljust(width)
      for n, (cell, width) in enumerate(zip(line, widths, strict=True))
    )
    for line in lines
  )
