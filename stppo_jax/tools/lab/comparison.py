"""Compares several algorithms on a saved batch.

B trajectories, L tokens. The agreement of two algorithms is the cosine between
their gradients with respect to logprobs_BL. A policy token counts as silenced
if its gradient is exactly 0 although its advantage is not 0.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from stppo_jax import streams
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.tools.lab import lab
from stppo_jax.tools.lab import saved_batch

SILENCED = 'silenced'


# Maps a label to an algorithm and the arrays on which it is computed. The
# arrays are the `lab.required_arrays` of the algorithm, as returned by
# `saved_batch.select`. All arrays are of one batch, but each algorithm may have
# its own advantages. The same algorithm with other settings has another label.
Compared = Mapping[str, tuple[algorithm_lib.Algorithm, saved_batch.Arrays]]


class Comparison(NamedTuple):
  """The result of a comparison, by the labels of the algorithms.

  Attributes:
    metrics: for each label, the metrics of `lab.loss_and_gradient`, and
      `silenced`, the share of policy tokens that are silenced.
    cosines: for each pair of labels, the cosine between the gradients of both
      algorithms; 0 if a gradient is 0 everywhere.
    levels: for each label, the level of the algorithm's ratio.
  """

  metrics: dict[str, dict[str, float]]
  cosines: dict[str, dict[str, float]]
  levels: dict[str, str]


def compare(compared: Compared) -> Comparison:
  """Compares the losses and the gradients of algorithms, without entropy bonus.

  Raises:
    saved_batch.NotFinite: a result is too large for the precision; the message
      begins with the label of the algorithm.
  """
  metrics, directions = {}, {}
  for label, (algorithm, arrays) in compared.items():
    try:
      found = lab.loss_and_gradient(algorithm, arrays, entropy_coefficient=0.0)
    except saved_batch.NotFinite as error:
      raise saved_batch.NotFinite(f'{label}: {error}') from error
    gradient_BL = found.arrays['dloss_dlogprobs_BL'].astype(np.float64)
    share = _silenced_share(gradient_BL, arrays)
    metrics[label] = found.metrics | {SILENCED: share}
    directions[label] = _direction(gradient_BL)
  cosines = {
    a: {b: float(np.vdot(directions[a], directions[b])) for b in directions}
    for a in directions
  }
  levels = {label: x.ratio.level for label, (x, _) in compared.items()}
  return Comparison(metrics, cosines, levels)


def _silenced_share(
  gradient_BL: np.ndarray, arrays: saved_batch.Arrays
) -> float:
  mask_BL = arrays['loss_mask_BL']
  silent_BL = (gradient_BL == 0) & (arrays['advantages_BL'] != 0) & mask_BL
  return float(silent_BL.sum() / max(mask_BL.sum(), 1))


def _direction(x: np.ndarray) -> np.ndarray:
  """Returns x / |x|; if all elements of x are 0, returns x."""
  largest = np.abs(x).max(initial=0.0)
  if not largest:
    return x
  x = x / largest  # otherwise the squares of small numbers would become 0
  return x / np.linalg.norm(x)


def table(comparison: Comparison, *, own_advantages: bool) -> str:
  """Returns a table of metrics and a table of cosines as text.

  Args:
    comparison: the result of `compare`.
    own_advantages: whether each algorithm had the advantages of its own
      estimator.
  """
  advantages = (
    'Each algorithm has the\nadvantages of its own estimator.'
    if own_advantages
    else 'All are computed on the\nsame advantages.'
  )
  head = ('algorithm', 'loss', 'grad norm', 'cut', 'below', 'above', SILENCED)
  lines: list[tuple[str, ...]] = [head]
  for label, metrics in comparison.metrics.items():
    band = f'clipfrac/{comparison.levels[label]}'
    shares = (
      metrics['actor/pg_clipfrac'],
      metrics[f'{band}/low'],
      metrics[f'{band}/high'],
      metrics[SILENCED],
    )
    numbers = metrics['loss'], metrics['actor/grad_norm']
    lines.append(
      (label, *(f'{x:.6g}' for x in numbers), *(f'{x:.2%}' for x in shares))
    )
  labels = list(comparison.metrics)
  matrix: list[tuple[str, ...]] = [('cosine', *labels)]
  for a in labels:
    cosines = (comparison.cosines[a][b] for b in labels)
    # A gradient that is 0 everywhere has no direction, and so no cosines.
    known = (
      comparison.cosines[a][a] and comparison.cosines[b][b] for b in labels
    )
    matrix.append(
      (a, *(f'{x:.4f}' if y else '–' for x, y in zip(cosines, known)))
    )
  summary, agreement = (
    '\n'.join(streams.aligned(rows, right=True)) for rows in (lines, matrix)
  )
  return (
    f'{summary}\n'
    'cut: tokens whose gradient the objective cut; below, above: tokens whose '
    "ratio\nat the algorithm's level is outside the band; silenced: policy "
    f'tokens with an\nadvantage but without a gradient. {advantages} '
    f'Cosine –: a gradient is 0 everywhere.\n\n{agreement}'
  )
