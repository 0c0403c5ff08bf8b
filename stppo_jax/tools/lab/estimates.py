"""Computes the advantages of an estimator on a saved batch.

B trajectories, L tokens. Nothing is random and nothing is trained. The rewards
come from the file. `penalized` subtracts a KL penalty from the rewards, as a
run with `kl.where` = 'reward' does.
"""

from collections.abc import Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.rl import advantages as advantages_lib
from stppo_jax.rl import diagnostics as diagnostics_lib
from stppo_jax.rl import estimator_needs
from stppo_jax.rl import gae
from stppo_jax.rl import kl as kl_lib
from stppo_jax.rl import masking
from stppo_jax.rl import options as options_lib
from stppo_jax.tools.lab import saved_batch

# The arrays from which `penalized` computes the KL penalty.
PENALTY_ARRAYS = ('old_logprobs_BL', 'ref_logprobs_BL')


def build_estimator(options: Mapping) -> Any:
  """Returns the estimator that options describe, see `rl.advantages`.

  Raises:
    ValueError: options are wrong; the message has a line for each wrong option.
  """
  lines = options_lib.check(advantages_lib.ADVANTAGES, options, 'advantage')
  if lines:
    raise ValueError('\n'.join(lines))
  return options_lib.build(advantages_lib.ADVANTAGES, options)


def required_arrays(estimator: Any) -> frozenset[str]:
  """Returns the names of the arrays that an estimator reads.

  Args:
    estimator: the result of `build_estimator`.
  """
  names = {'rewards_BL', 'loss_mask_BL', 'turn_ids_BL'}
  if estimator.name in estimator_needs.VALUES:
    names.add('old_values_BL')
  if estimator.name in estimator_needs.STATES:
    names.add('state_ids_BL')
  if estimator.name in estimator_needs.GROUPS:
    names.add('group_ids_B')
  return frozenset(names)


def check(estimator: Any, arrays: saved_batch.Arrays) -> None:
  """Checks arrays for an estimator, beyond the checks of `saved_batch.select`.

  Raises:
    ValueError: turn ids decrease within a row, so turns have no clear
      beginning; all groups have a single row, although the estimator compares
      the rows of a group; or values that the estimator reads at observation
      tokens are not finite. The message has a line for each problem.
  """
  lines = []
  ids_B = arrays.get('group_ids_B', ())
  if estimator.name in estimator_needs.GROUPS and len({*ids_B}) == len(ids_B):
    lines.append(
      f'group_ids_B: some rows must share an id, because {estimator.name} '
      'compares the rows of a group; with groups of one all advantages are 0'
    )
  # Turn ids are 0 between two turns. So the id of a token is compared with the
  # highest id before it, and not with the id of the token before it.
  ids_BL = arrays['turn_ids_BL']
  highest_BL = np.maximum.accumulate(ids_BL, axis=1)
  wrong_BL = (ids_BL > 0) & (ids_BL < highest_BL)
  if wrong_BL.any():
    rule = 'turn_ids_BL: must not decrease in a row'
    lines.append(saved_batch.locate(rule, wrong_BL))
  options = estimator.arguments()
  if 'observation_tokens' in options:
    reads = gae.OBSERVATION_TOKENS[options['observation_tokens']]
    reads_BL = np.asarray(reads(arrays['loss_mask_BL']))
    name = 'old_values_BL'
    lines += saved_batch.not_finite(name, arrays[name], reads_BL)
  if lines:
    raise ValueError('\n'.join(lines))


def check_penalty(estimator: Any, kl: str) -> None:
  """Checks that a KL penalty can be used with an estimator of advantages.

  Args:
    estimator: the result of `build_estimator`.
    kl: the name of an estimator of the KL, a key of `kl.KL_ESTIMATORS`.

  Raises:
    ValueError: there is no such estimator of the KL, or the estimator of
      advantages would count the penalty as a reward of the turns.
  """
  if kl not in kl_lib.KL_ESTIMATORS:
    raise ValueError(f'must be one of {", ".join(kl_lib.KL_ESTIMATORS)}')
  if estimator.name in estimator_needs.TURN_REWARDS:
    raise ValueError(
      f'not allowed with {estimator.name}, which would count the penalty as a '
      'reward of the turns'
    )


def penalized(
  arrays: saved_batch.Arrays, *, estimator: str, coefficient: float
) -> saved_batch.Arrays:
  """Returns the arrays with a KL penalty subtracted from the rewards.

    rewards_BL - coefficient * KL(old policy, reference)      (see `rl.kl`)

  Args:
    arrays: the result of `saved_batch.select`, with `PENALTY_ARRAYS`.
    estimator: a key of `kl.KL_ESTIMATORS`.
    coefficient: the penalty's coefficient when the batch was collected.
  """
  mask_BL = jnp.asarray(arrays['loss_mask_BL'])
  kl_BL = kl_lib.kl_estimate(
    jnp.asarray(arrays['old_logprobs_BL']),
    jnp.asarray(arrays['ref_logprobs_BL']),
    mask_BL,
    estimator=estimator,
  )
  rewards_BL = kl_lib.penalized_rewards(
    jnp.asarray(arrays['rewards_BL']), kl_BL, mask_BL, coefficient=coefficient
  )
  return {**arrays, 'rewards_BL': np.asarray(rewards_BL)}


def estimate(estimator: Any, arrays: saved_batch.Arrays) -> saved_batch.Result:
  """Computes the advantages and the returns of a saved batch.

  The metrics are {advantages,returns}/{mean,std,min,max} over the loss mask,
  where std is the root of the unbiased variance. A metric that is too large for
  the precision is not finite. The arrays are advantages_BL, returns_BL and
  value_mask_BL.

  Args:
    estimator: the result of `build_estimator`.
    arrays: the result of `saved_batch.select`, with the `required_arrays`, for
      which `check` raises no error. No KL penalty is subtracted here, see
      `penalized`.

  Raises:
    saved_batch.NotFinite: a result is too large for the precision.
  """
  results, metrics = jax.device_get(
    _estimate(
      estimator,
      saved_batch.token_batch(arrays),
      num_turns=saved_batch.num_turns(arrays),
    )
  )
  saved_batch.check_finite(results)
  return saved_batch.Result(
    {name: float(x) for name, x in metrics.items()}, results
  )


@functools.partial(jax.jit, static_argnames='num_turns')
def _estimate(estimator, batch, *, num_turns):
  """Returns (arrays by name, metrics by name), on the device."""
  estimated = advantages_lib.estimate_advantages(
    batch.rewards_BL,
    batch,
    num_turns=num_turns,
    name=estimator.name,
    **estimator.arguments(),
  )
  metrics = {}
  for name in ('advantages', 'returns'):
    x_BL = getattr(estimated, f'{name}_BL')
    _, variance = masking.masked_moments(x_BL, batch.loss_mask_BL)
    metrics |= diagnostics_lib.describe(name, x_BL, batch.loss_mask_BL)
    metrics[f'{name}/std'] = jnp.sqrt(variance)
  arrays = {
    'advantages_BL': estimated.advantages_BL,
    'returns_BL': estimated.returns_BL,
    'value_mask_BL': estimated.value_mask_BL,
  }
  return arrays, metrics
