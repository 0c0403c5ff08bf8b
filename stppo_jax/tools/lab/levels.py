"""Measures a saved batch's ratios at every level, and the algorithms' bounds.

B trajectories, L tokens. At each level, such as turn or sequence, tokens form
segments. The log-ratio of a segment is the mean of the log-ratios of its
tokens, see `rl.ratios`.
"""

import functools
import math
from typing import NamedTuple

import jax
import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax import streams
from stppo_jax.rl import ratios
from stppo_jax.rl import segments
from stppo_jax.tools.lab import comparison
from stppo_jax.tools.lab import lab
from stppo_jax.tools.lab import saved_batch

_QUANTILES = (0.01, 0.5, 0.99)
# Objectives that read no bounds, and objectives that apply the bounds to the
# ratio of each token, whatever the level of the algorithm is.
WITHOUT_BOUNDS = frozenset(
  {'soft_gate', 'quadratic', 'unclipped', 'gamma_weighted', 'kl_cov'}
)
OF_TOKENS = frozenset({'geometric'})


class Bounds(NamedTuple):
  """The bounds of an algorithm, on a saved batch.

  Attributes:
    level: the level of the ratios to which the bounds apply.
    low, high: the medians of the lower and the upper bound over the policy
      tokens; nan if the algorithm has no bounds.
    below: the share of the policy tokens whose ratio is below the lower bound;
      nan if the algorithm has no bounds.
    above: the share of the policy tokens whose ratio is above the upper bound;
      nan if the algorithm has no bounds.
  """

  level: str
  low: float
  high: float
  below: float
  above: float


class Levels(NamedTuple):
  """The ratios of a saved batch, and the bounds of algorithms on them.

  Attributes:
    log_ratios: for each level, the log-ratio of each segment.
    bounds: the bounds of each algorithm, by the label of the algorithm.
  """

  log_ratios: dict[str, np.ndarray]
  bounds: dict[str, Bounds]


def measure(compared: comparison.Compared) -> Levels:
  """Returns the ratios at all levels, and the bounds of each algorithm.

  The level 'sentence' is left out if the batch has no sentence ids.

  Raises:
    saved_batch.NotFinite: a result is too large for the precision.
  """
  bounds = {}
  for label, (algorithm, arrays) in compared.items():
    mask_BL = arrays['loss_mask_BL'].astype(bool)
    if algorithm.objective.name in WITHOUT_BOUNDS:
      nan = float('nan')
      bounds[label] = Bounds(algorithm.ratio.level, nan, nan, nan, nan)
      continue
    level = algorithm.ratio.level
    # Some clip rules set different bounds for each token or turn. So the bounds
    # are taken from a computed loss and not from the options.
    found = lab.loss_and_gradient(algorithm, arrays, entropy_coefficient=0.0)
    low, high, ratio = (
      found.arrays[name][mask_BL] for name in ('low_BL', 'high_BL', 'ratio_BL')
    )
    if algorithm.objective.name in OF_TOKENS:
      log_ratio_BL = arrays['logprobs_BL'] - arrays['old_logprobs_BL']
      level, ratio = 'token', np.exp(log_ratio_BL[mask_BL])
    bounds[label] = Bounds(
      level,
      float(np.median(low)),
      float(np.median(high)),
      float((ratio < low).mean()),
      float((ratio > high).mean()),
    )
  _, arrays = next(iter(compared.values()))
  return Levels(_log_ratios(arrays), bounds)


def _log_ratios(arrays: saved_batch.Arrays) -> dict[str, np.ndarray]:
  """Returns the log-ratio of each segment, by level."""
  batch = saved_batch.token_batch(arrays)
  mask_BL = np.asarray(batch.loss_mask_BL)
  of_tokens = jax.device_get(
    _token_log_ratios(
      batch, arrays['logprobs_BL'], num_turns=saved_batch.num_turns(arrays)
    )
  )
  found = {}
  # A jitted function sorts its results by name; here they follow the levels.
  for level in (x for x in segments.LEVELS if x in of_tokens):
    ratio_BL, ids_BL = of_tokens[level]
    # Segments of different rows may have the same id, so a segment's number is
    # made from row and id. All tokens of a segment have one ratio, so the ratio
    # of the first token is taken.
    numbers = np.arange(len(mask_BL))[:, None] * (mask_BL.shape[1] + 1) + ids_BL
    _, firsts = np.unique(numbers[mask_BL], return_index=True)
    found[level] = ratio_BL[mask_BL][firsts]
  return found


@functools.partial(jax.jit, static_argnames='num_turns')
def _token_log_ratios(
  batch: batch_lib.TokenBatch, logprobs_BL: jax.Array, *, num_turns: int
) -> dict[str, tuple[jax.Array, jax.Array]]:
  """Returns each token's log-ratio [B, L] and segment id [B, L], by level."""
  token_BL = ratios.token_log_ratio(
    logprobs_BL, batch.old_logprobs_BL, batch.loss_mask_BL
  )
  found = {}
  for level in segments.LEVELS:
    if level == 'sentence' and batch.sentence_ids_BL is None:
      continue
    ids_BL, _ = segments.level_segments(level, batch, num_turns=num_turns)
    ratio_BL = ratios.level_log_ratio(
      token_BL,
      batch,
      level=level,
      gradient='segment',
      reduce='mean',
      num_turns=num_turns,
    )
    found[level] = ratio_BL, ids_BL
  return found


def table(levels: Levels) -> str:
  """Returns a table of the levels and a table of the bounds as text."""
  head = ('level', 'segments', 'spread', *(f'p{q:.0%}' for q in _QUANTILES))
  lines: list[tuple[str, ...]] = [tuple(x.rstrip('%') for x in head)]
  for level, x in levels.log_ratios.items():
    numbers = (x.std(), *np.quantile(x, _QUANTILES))
    lines.append((level, f'{len(x)}', *(f'{y:.3g}' for y in numbers)))
  rows: list[tuple[str, ...]] = [
    ('algorithm', 'level', 'low', 'high', 'below', 'above')
  ]
  for label, x in levels.bounds.items():
    cells = [
      # Ratios are positive, so a lower bound of 0 or less excludes no ratio.
      f'{x.low:.5g}' if x.low > 0 else 'none',
      f'{x.high:.5g}',
      f'{x.below:.2%}',
      f'{x.above:.2%}',
    ]
    rows.append((label, x.level, *(['—'] * 4 if math.isnan(x.low) else cells)))
  first, second = (
    '\n'.join(streams.aligned(rows, right=True)) for rows in (lines, rows)
  )
  return (
    f'{first}\nthe log-ratio of a segment is the mean over its tokens; spread: '
    f'standard\ndeviation; p1, p50, p99: percentiles\n\n{second}\n'
    'low, high: medians of the bounds on the ratio; below, above: policy '
    'tokens with a\nratio outside them; —: the objective reads no bounds'
  )
