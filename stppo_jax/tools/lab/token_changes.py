"""Measures which tokens of a saved batch an algorithm cuts or amplifies.

B trajectories, L tokens. The multiplier of a token is the loss's gradient at
this token, divided by the same gradient at the old policy, where all ratios are
1. A KL term of the loss is left out of both gradients. A factor that all tokens
share does not change the direction of the gradient, so all multipliers are
divided by the median of the positive multipliers.

A grouping divides the policy tokens into groups, for example by their turn.
"""

from collections.abc import Callable, Mapping
import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.tools.lab import comparison
from stppo_jax.tools.lab import lab
from stppo_jax.tools.lab import saved_batch

# A multiplier that differs from 1 by more than this counts as a change.
_TOLERANCE = 0.1
_MOST_TURNS = 8  # the turns from this number on are one group
_NUM_LENGTHS = 8  # the number of groups by the length of turns
# The edges between the groups of log-ratios.
_LOG_RATIOS = (-0.5, -0.2, -0.05, -0.01, 0.01, 0.05, 0.2, 0.5)


class Groups(NamedTuple):
  """The groups of a grouping of policy tokens.

  Attributes:
    labels: the label of each group, in the order of the groups.
    ids_BL: the number of each token's group, from 0; -1 off the loss mask.
  """

  labels: list[str]
  ids_BL: np.ndarray


class Shares(NamedTuple):
  """The shares of tokens that an algorithm changes; one element per group.

  A share is over those tokens of a group that have a multiplier.

  Attributes:
    cut: the shares of tokens whose multiplier is 0 or negative. The gradient of
      such a token is 0 or has the wrong sign for the token's advantage.
    weakened: the shares of tokens with a multiplier above 0 and below 0.9.
    amplified: the shares of tokens with a multiplier above 1.1.
  """

  cut: np.ndarray
  weakened: np.ndarray
  amplified: np.ndarray


# Maps the name of a grouping to a pair: its groups, and the shares of changed
# tokens in these groups, by the label of the algorithm.
Changes = Mapping[str, tuple[Groups, Mapping[str, Shares]]]


def measure(compared: comparison.Compared) -> Changes:
  """Returns the shares of tokens that each algorithm changes, by grouping."""
  found = {label: multipliers(*x) for label, x in compared.items()}
  _, arrays = next(iter(compared.values()))
  return {
    grouping: (groups, {label: shares(x, groups) for label, x in found.items()})
    for grouping, groups in groupings(arrays).items()
  }


def multipliers(
  algorithm: algorithm_lib.Algorithm, arrays: saved_batch.Arrays
) -> np.ndarray:
  """Returns the multiplier of each token, [B, L] float64.

  The multiplier is nan off the loss mask, and for a token that has no gradient
  even at the old policy, such as a token whose advantage is 0.

  Raises:
    saved_batch.NotFinite: a result is too large for the precision.
  """

  # The gradient of a KL term would make the gradient of a cut token differ from
  # 0.
  kl = dataclasses.replace(algorithm.kl, where='nowhere')
  algorithm = dataclasses.replace(algorithm, kl=kl)

  def gradient(logprobs_BL):
    found = lab.loss_and_gradient(
      algorithm, {**arrays, 'logprobs_BL': logprobs_BL}, entropy_coefficient=0.0
    )
    return found.arrays['dloss_dlogprobs_BL'].astype(np.float64)

  # At the old policy, the gradient of a token depends on its advantage and on
  # the algorithm's weight of the token. The quotient removes both, so that only
  # the effect of the ratio is left.
  new_BL = gradient(arrays['logprobs_BL'])
  old_BL = gradient(arrays['old_logprobs_BL'])
  known_BL = arrays['loss_mask_BL'].astype(bool) & (old_BL != 0)
  ratio_BL = np.divide(
    new_BL, old_BL, out=np.full(new_BL.shape, np.nan), where=known_BL
  )
  positive = ratio_BL[ratio_BL > 0]
  return ratio_BL / np.median(positive) if positive.size else ratio_BL


def shares(multipliers_BL: np.ndarray, groups: Groups) -> Shares:
  """Returns the shares of changed tokens in each group.

  The shares of a group without multipliers are nan.
  """

  def share(of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    found = []
    for number in range(len(groups.labels)):
      values = multipliers_BL[groups.ids_BL == number]
      values = values[~np.isnan(values)]
      found.append(of(values).mean() if values.size else np.nan)
    return np.array(found)

  return Shares(
    share(lambda m: m <= 0),
    share(lambda m: (m > 0) & (m < 1 - _TOLERANCE)),
    share(lambda m: m > 1 + _TOLERANCE),
  )


def groupings(arrays: saved_batch.Arrays) -> Mapping[str, Groups]:
  """Returns three groupings: by turn, by length of the turn, by log-ratio."""
  mask_BL = arrays['loss_mask_BL'].astype(bool)
  turns_BL = np.where(mask_BL, arrays['turn_ids_BL'], 0)
  most = min(int(turns_BL.max()), _MOST_TURNS)
  names = [str(turn) for turn in range(1, most + 1)]
  if turns_BL.max() > most:
    names[-1] += '+'
  # Turns are counted within each row, so each turn of the batch gets a number
  # of its own.
  rows_B = np.arange(len(turns_BL))
  numbers_BL = rows_B[:, None] * (turns_BL.max() + 1) + turns_BL
  lengths_BL = np.bincount(numbers_BL.ravel())[numbers_BL]
  log_ratio_BL = arrays['logprobs_BL'] - arrays['old_logprobs_BL']
  edges = [f'{edge:g}' for edge in _LOG_RATIOS]
  spans = [f'{low} … {high}' for low, high in itertools.pairwise(edges)]
  bins_BL = np.searchsorted(_LOG_RATIOS, log_ratio_BL)
  return {
    'turn': Groups(names, np.minimum(turns_BL, most) - 1),
    'tokens of the turn': _by_length(lengths_BL, mask_BL),
    'log-ratio of the token': Groups(
      [f'< {edges[0]}', *spans, f'> {edges[-1]}'],
      np.where(mask_BL, bins_BL, -1),
    ),
  }


def _by_length(lengths_BL: np.ndarray, mask_BL: np.ndarray) -> Groups:
  """Returns groups of tokens by the lengths of the tokens' turns.

  The groups have about equal numbers of tokens. The label of a group is the
  median of these lengths over the tokens of the group.
  """
  lengths = lengths_BL[mask_BL]
  inner = np.linspace(0, 1, _NUM_LENGTHS + 1)[1:-1]
  edges = np.unique(np.quantile(lengths, inner, method='higher'))
  # If many lengths are equal, some groups have no token and are removed.
  numbers = np.searchsorted(edges, lengths, side='right')
  _, numbers = np.unique(numbers, return_inverse=True)
  ids_BL = np.full(mask_BL.shape, -1)
  ids_BL[mask_BL] = numbers
  medians = [np.median(lengths[numbers == n]) for n in range(max(numbers) + 1)]
  return Groups([f'{median:.0f}' for median in medians], ids_BL)
