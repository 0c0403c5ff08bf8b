"""Measures a critic and advantage estimators against sampled values.

A saved batch has sampled values at some tokens, see `continuations`. At such a
token, let m be the mean and s² the variance of the rewards of n continuations.
The value V itself is not known: m estimates V with a noise of variance s²/n. So
m takes the place of V below, and the variance of the noise is subtracted from
Var V and from mean (critic - V)². The figures below then estimate their values
for an infinite number of continuations.

  ceiling    Var V / (Var V + mean s²): the share of the variance of rewards
             that a perfect critic explains; the rest is luck
  explained  1 - (mean (critic - V)² + mean s²) / (Var V + mean s²)
  bias       mean (critic - V)
  error      the root of mean (critic - V)²
  slope      Cov(critic, V) / Var critic, which is 1 for a calibrated critic

The sampled advantage of a turn is the sum of the rewards on its tokens, plus
the value after the turn, minus the value before the turn. An estimator is
judged by the correlation between this sampled advantage and the mean over the
turn of the estimator's advantages. Because of the noise, even perfect
advantages have a correlation below 1: the root of the share of the sampled
advantages' variance that is not noise.

B trajectories, L tokens.
"""

from collections.abc import Iterable, Mapping
import json
import math
from typing import Any, NamedTuple

import numpy as np

from stppo_jax import streams
from stppo_jax.tools.lab import saved_batch

# The arrays that this module reads, without the arrays of the estimators.
ARRAYS = (
  'loss_mask_BL',
  'turn_ids_BL',
  'rewards_BL',
  'oracle_values_BL',
  'oracle_variances_BL',
  'oracle_counts_BL',
)
ALL_TURNS = 'all'
_REMEDY = 'collect the batch with --continuations=N, where N is 2 or more'


class Critic(NamedTuple):
  """The figures of a critic, which the module docstring defines."""

  explained: float
  bias: float
  error: float
  slope: float


class OfTurn(NamedTuple):
  """The figures of the sampled values of a turn.

  Attributes:
    prefixes: the number of tokens of the turn that have a sampled value.
    mean: the mean of the sampled values.
    spread: the standard deviation of the sampled values, without their noise.
    luck: the standard deviation of the rewards of continuations around the
      value of the continued prefix.
    ceiling: the explained variance of a perfect critic.
    critic: the figures of the critic; None if the batch has no critic's values.
  """

  prefixes: int
  mean: float
  spread: float
  luck: float
  ceiling: float
  critic: Critic | None


class Correlations(NamedTuple):
  """The correlations of advantages with sampled advantages, turn by turn.

  Attributes:
    turns: the numbers of the turns that have sampled advantages.
    most: for each of these turns, the correlation that perfect advantages would
      have.
    estimators: maps the name of an estimator to the correlations of its
      advantages, one for each of these turns. A correlation is nan if the
      advantages of the estimator, or the sampled advantages, are all equal.
  """

  turns: list[int]
  most: list[float]
  estimators: dict[str, list[float]]


def check(arrays: saved_batch.Arrays) -> None:
  """Raises ValueError if the arrays of a file have no sampled values."""
  if 'oracle_counts_BL' not in arrays:
    raise ValueError(f'no sampled values (oracle_counts_BL); {_REMEDY}')


def values(arrays: saved_batch.Arrays) -> dict[str, OfTurn]:
  """Returns the figures of all turns together, and of each turn.

  The keys are `ALL_TURNS` and the numbers of the turns. A turn with fewer than
  two sampled values has no entry.

  Args:
    arrays: the result of `saved_batch.select` with `ARRAYS`, and with
      old_values_BL if there is a critic.

  Raises:
    ValueError: fewer than two tokens have a sampled value.
  """
  sampled_BL = arrays['oracle_counts_BL'] > 1
  if sampled_BL.sum() < 2:
    raise ValueError(
      'oracle_counts_BL: at least two tokens must have two or more '
      f'continuations; {_REMEDY}'
    )
  turns = np.unique(arrays['turn_ids_BL'][sampled_BL])
  chosen = {str(t): sampled_BL & (arrays['turn_ids_BL'] == t) for t in turns}
  return {
    name: _of_places(arrays, places_BL)
    for name, places_BL in {ALL_TURNS: sampled_BL, **chosen}.items()
    if places_BL.sum() > 1
  }


def _of_places(arrays: saved_batch.Arrays, places_BL: np.ndarray) -> OfTurn:
  """Returns the figures of the sampled values where `places_BL` is true."""

  def at_places(name: str) -> np.ndarray:
    return arrays[name][places_BL].astype(np.float64)

  means, variances = map(at_places, ('oracle_values_BL', 'oracle_variances_BL'))
  noise = np.mean(variances / at_places('oracle_counts_BL'))
  luck = np.mean(variances)
  # The variance of the sampled means contains the noise. With few prefixes the
  # noise can be larger than this variance, but no variance is negative.
  spread = max(np.var(means, ddof=1) - noise, 0.0)
  total = spread + luck
  critic = None
  if 'old_values_BL' in arrays:
    guesses = at_places('old_values_BL')
    error = max(np.mean((guesses - means) ** 2) - noise, 0.0)
    # A critic with one value everywhere, such as a new critic, has no slope.
    varies = np.ptp(guesses) > 0
    critic = Critic(
      explained=_quotient(total - error - luck, total),
      bias=float(np.mean(guesses - means)),
      error=math.sqrt(error),
      slope=float(np.polyfit(guesses, means, 1)[0]) if varies else math.nan,
    )
  return OfTurn(
    prefixes=len(means),
    mean=float(np.mean(means)),
    spread=math.sqrt(spread),
    luck=math.sqrt(luck),
    ceiling=_quotient(spread, total),
    critic=critic,
  )


def _quotient(above: Any, below: Any) -> float:
  return float(above / below) if below else math.nan


def correlations(
  arrays: saved_batch.Arrays, estimated: Mapping[str, np.ndarray]
) -> Correlations:
  """Returns the correlations of estimated and sampled advantages by turn.

  Args:
    arrays: the result of `saved_batch.select` with `ARRAYS`.
    estimated: maps the name of an estimator to its advantages_BL.
  """
  ids_BL, last = arrays['turn_ids_BL'], int(arrays['turn_ids_BL'].max())
  found = Correlations([], [], {name: [] for name in estimated})
  before = _firsts(arrays, 1)
  for turn in range(1, last + 1):
    after = _firsts(arrays, turn + 1)
    own_BL = ids_BL == turn
    # If a dialogue ends with this turn, the value after the turn is 0.
    ends_B = ~(ids_BL > turn).any(axis=1)
    known_B = before.known_B & (after.known_B | ends_B)
    # Any two points lie on a line, so a correlation of two points says nothing.
    if known_B.sum() > 2:
      earned_B = np.where(own_BL, arrays['rewards_BL'], 0.0).sum(axis=1)
      truth_B = earned_B + after.mean_B - before.mean_B
      # The two values are sampled independently, so the variances of their
      # errors add up.
      noise = np.mean((before.noise_B + after.noise_B)[known_B])
      variance = np.var(truth_B[known_B], ddof=1)
      found.turns.append(turn)
      found.most.append(np.sqrt(_quotient(max(variance - noise, 0), variance)))
      for name, advantages_BL in estimated.items():
        sums_B = np.where(own_BL, advantages_BL, 0.0).sum(axis=1)
        means_B = sums_B / np.maximum(own_BL.sum(axis=1), 1)
        found.estimators[name].append(
          _correlation(means_B[known_B], truth_B[known_B])
        )
    before = after
  return found


class _Firsts(NamedTuple):
  """For each row, the sampled value before a turn, and its noise's variance.

  If `known_B` is False for a row, the value is not known, and both are 0.
  """

  known_B: np.ndarray
  mean_B: np.ndarray
  noise_B: np.ndarray


def _firsts(arrays: saved_batch.Arrays, turn: int) -> _Firsts:
  """Returns the sampled values of all rows at the first token of a turn.

  Args:
    arrays: the arrays of the saved batch.
    turn: the number of the turn.
  """
  own_BL = arrays['turn_ids_BL'] == turn
  places = np.arange(len(own_BL)), own_BL.argmax(axis=1)
  # In a row without this turn, `argmax` is 0, the position of another token.
  count_B = np.where(own_BL.any(axis=1), arrays['oracle_counts_BL'][places], 0)
  known_B = count_B > 1
  mean_B, variance_B = (
    np.where(known_B, arrays[name][places].astype(np.float64), 0.0)
    for name in ('oracle_values_BL', 'oracle_variances_BL')
  )
  return _Firsts(known_B, mean_B, variance_B / np.maximum(count_B, 1))


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
  if np.ptp(x) == 0 or np.ptp(y) == 0:
    return math.nan
  return float(np.corrcoef(x, y)[0, 1])


def table(by_turn: Mapping[str, OfTurn], correlated: Correlations) -> str:
  """Returns the figures and the correlations as two tables of text."""
  names = ('turn', 'prefixes', 'value', 'spread', 'luck', 'ceiling')
  critics = ('explained', 'bias', 'error', 'slope')
  has_critic = all(x.critic for x in by_turn.values())
  lines: list[tuple[str, ...]] = [(*names, *(critics if has_critic else ()))]
  for turn, x in by_turn.items():
    numbers = [x.mean, x.spread, x.luck, x.ceiling, *(x.critic or ())]
    lines.append((turn, str(x.prefixes), *_texts(numbers)))
  head = ('estimator', *map(str, correlated.turns))
  rows = {'(perfect)': correlated.most, **correlated.estimators}
  agreed = [head, *((name, *_texts(x)) for name, x in rows.items())]
  figures, agreement = (
    '\n'.join(streams.aligned(x, right=True)) for x in (lines, agreed)
  )
  return '\n'.join(
    [
      figures,
      'spread: standard deviation of the sampled values; luck: standard',
      'deviation of the returns around their value; ceiling, explained: the',
      'explained variance of a perfect critic, and of the critic of this file.',
      '',
      agreement,
      "Correlation of a turn's mean advantage with its sampled advantage. Even",
      'perfect advantages reach less than 1, because the samples are noisy.',
    ]
  )


def as_json(by_turn: Mapping[str, OfTurn], correlated: Correlations) -> str:
  """Returns figures and correlations as JSON, with null in place of nan."""

  def plain(x):
    if hasattr(x, '_asdict'):
      x = x._asdict()
    if isinstance(x, Mapping):
      return {name: plain(y) for name, y in x.items()}
    if isinstance(x, list):
      return [plain(y) for y in x]
    return None if isinstance(x, float) and math.isnan(x) else x

  return json.dumps(
    {'turns': plain(by_turn), 'advantages': plain(correlated)}, allow_nan=False
  )


def _texts(numbers: Iterable[float]) -> list[str]:
  return ['-' if math.isnan(x) else f'{x:.3f}' for x in numbers]
