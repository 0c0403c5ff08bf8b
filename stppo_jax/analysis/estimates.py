"""What an advantage estimator makes of frozen rollouts.

B trajectories, L tokens. Nothing is random and nothing is learned. The rewards
are those of the file; a run whose KL penalty is in the rewards has others, see
`penalized`.
"""

from collections.abc import Mapping
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.analysis import saved_batch
from stppo_jax.rl import advantages as advantages_lib
from stppo_jax.rl import diagnostics as diagnostics_lib
from stppo_jax.rl import kl as kl_lib
from stppo_jax.rl import masking
from stppo_jax.rl import options as options_lib

PENALTY_ARRAYS = ('old_logprobs_BL', 'ref_logprobs_BL')
_READ_TURN_REWARDS = frozenset({'turn_group'})  # a run refuses it too
_VALUES = frozenset({'old_values_BL', 'values_BL'})


class Estimate(typing.NamedTuple):
  """What an estimator makes of frozen rollouts.

  Attributes:
    metrics: {advantages,returns}/{mean,std,min,max} over the loss mask; std is
      the root of the unbiased variance. Not finite where they are too large
      for the precision.
    arrays: advantages_BL, returns_BL and value_mask_BL.
  """

  metrics: dict[str, float]
  arrays: dict[str, np.ndarray]


def build_estimator(options: Mapping) -> typing.Any:
  """Returns the options of an estimator, checked.

  Raises:
    ValueError: every option that is wrong, one line each.
  """
  lines = options_lib.check(advantages_lib.ADVANTAGES, options, 'advantage')
  if lines:
    raise ValueError('\n'.join(lines))
  return options_lib.build(advantages_lib.ADVANTAGES, options)


def required_arrays(
  estimator: typing.Any,
  rollouts: saved_batch.Arrays,
  *,
  compares: bool,
) -> frozenset[str]:
  """The arrays without which an estimator cannot be had.

  Args:
    estimator: from `build_estimator`.
    rollouts: from `batch_file.load`. The values are the old ones, of the
      model before the first update; a file without them has one kind only.
    compares: whether it compares the rows of a group.
  """
  found = {'rewards_BL', 'loss_mask_BL', 'turn_ids_BL'}
  if estimator.name in advantages_lib.USES_VALUES:
    only = 'values_BL' in rollouts and 'old_values_BL' not in rollouts
    found.add('values_BL' if only else 'old_values_BL')
  if estimator.name in advantages_lib.USES_STATES:
    found.add('state_ids_BL')
  if compares:
    found.add('group_ids_B')
  return frozenset(found)


def check(estimator: typing.Any, rollouts: saved_batch.Arrays) -> None:
  """Looks for what an estimator cannot be had of.

  Raises:
    ValueError: one line each. Turn ids that decrease within a row (a turn
      would have no beginning), and values of observation tokens that are read
      and not finite.
  """
  lines = []
  ids_BL = rollouts['turn_ids_BL']  # 0 off the loss mask
  highest_BL = np.maximum.accumulate(ids_BL, axis=1)
  wrong_BL = (ids_BL > 0) & (ids_BL < highest_BL)
  if wrong_BL.any():
    lines.append(
      saved_batch.locate('turn_ids_BL: must not decrease in a row', wrong_BL)
    )
  options = estimator.arguments()
  if 'observation_tokens' in options:
    read = advantages_lib.OBSERVATION_TOKENS[options['observation_tokens']]
    read_BL = np.asarray(read(rollouts['loss_mask_BL']))
    for name in _VALUES & rollouts.keys():
      lines += saved_batch.not_finite(name, rollouts[name], read_BL)
  if lines:
    raise ValueError('\n'.join(lines))


def check_penalty(estimator: typing.Any, kl: str) -> None:
  """Looks whether an estimator of advantages may follow one of the KL.

  Raises:
    ValueError: no such estimator of the KL, or rewards that take no penalty.
  """
  if kl not in kl_lib.KL_ESTIMATORS:
    raise ValueError(f'must be one of {", ".join(kl_lib.KL_ESTIMATORS)}')
  if estimator.name in _READ_TURN_REWARDS:
    raise ValueError(
      f'would count as a reward of the turns in {estimator.name}'
    )


def penalized(
  rollouts: saved_batch.Arrays, *, estimator: str, coefficient: float
) -> saved_batch.Arrays:
  """The rollouts with the rewards of a run whose KL penalty is in them.

    rewards_BL - coefficient * KL(old policy, reference)      (see `rl.kl`)

  Args:
    rollouts: from `frozen.select`, with what `PENALTY_NEEDS` names.
    estimator: a key of `kl.KL_ESTIMATORS`.
    coefficient: in force when the rollouts were collected.
  """
  mask_BL = rollouts['loss_mask_BL']
  kl_BL = kl_lib.kl_estimate(
    rollouts['old_logprobs_BL'],
    rollouts['ref_logprobs_BL'],
    mask_BL,
    estimator=estimator,
  )
  rewards_BL = kl_lib.penalized_rewards(
    jnp.asarray(rollouts['rewards_BL']),
    kl_BL,
    mask_BL,
    coefficient=coefficient,
  )
  return {**rollouts, 'rewards_BL': np.asarray(rewards_BL)}


def estimate(estimator: typing.Any, rollouts: saved_batch.Arrays) -> Estimate:
  """Advantages and returns of the rewards as they are (see `penalized`).

  Args:
    estimator: from `build_estimator`.
    rollouts: from `frozen.select`, with what `needs` names, and checked.

  Raises:
    frozen.NotFinite: some are too large for the precision.
  """
  shape = rollouts['loss_mask_BL'].shape
  arrays = saved_batch.pad_empty(rollouts)
  if 'values_BL' in arrays and 'old_values_BL' not in arrays:
    arrays['old_values_BL'] = arrays['values_BL']
  found, metrics = jax.device_get(
    _estimate(
      estimator,
      saved_batch.token_batch(arrays),
      num_turns=saved_batch.num_turns(arrays),
    )
  )
  saved_batch.check_finite(found)
  return Estimate(
    {name: float(x) for name, x in metrics.items()},
    {name: saved_batch.unpad(x, shape) for name, x in found.items()},
  )


@functools.partial(jax.jit, static_argnames='num_turns')
def _estimate(estimator, batch, *, num_turns):
  """(arrays, scalar metrics) on the device."""
  found = advantages_lib.estimate_advantages(
    batch.rewards_BL, batch, num_turns=num_turns, **estimator.arguments()
  )
  metrics = {}
  for name in ('advantages', 'returns'):
    x_BL = getattr(found, f'{name}_BL')
    _, variance = masking.masked_moments(x_BL, batch.loss_mask_BL)
    metrics |= diagnostics_lib.describe(name, x_BL, batch.loss_mask_BL)
    metrics[f'{name}/std'] = jnp.sqrt(variance)
  arrays = {
    'advantages_BL': found.advantages_BL,
    'returns_BL': found.returns_BL,
    'value_mask_BL': found.value_mask_BL,
  }
  return arrays, metrics
