"""The lab: a row of the table, or an estimator, on frozen rollouts.

B trajectories, L tokens. The whole file is one minibatch and one microbatch,
and the parameters are the log-probabilities themselves: what `score` gives is
d loss / d logprobs_BL, the gradient that a model would hand on to its weights.
With a clipping bias of norm 'gradient' it is the combination that the update
forms (see `rl.gradients`), the norm being that over log-probabilities.

Nothing is random and nothing is learned; a row takes a compilation and then
milliseconds.
"""

from collections.abc import Mapping
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.analysis import frozen
from stppo_jax.rl import advantages as advantages_lib
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import blocks
from stppo_jax.rl import diagnostics as diagnostics_lib
from stppo_jax.rl import gradients as gradients_lib
from stppo_jax.rl import losses
from stppo_jax.rl import masking
from stppo_jax.rl import mismatch_metrics
from stppo_jax.rl import options as options_lib

_SCORED = (
  'turn_ids_BL',
  'loss_mask_BL',
  'logprobs_BL',
  'old_logprobs_BL',
  'advantages_BL',
)
# Read where they are there: they say more, and change nothing of the loss.
SCORE_USES = ('entropy_BL', 'sentence_ids_BL', 'sampler_logprobs_BL')
ADVANTAGES_USES = ('group_ids_B', 'state_ids_BL')
_VALUES = frozenset({'old_values_BL', 'values_BL'})


_HEADS = ('policy', 'bias', 'other')  # of a `PolicyLoss`


class Score(typing.NamedTuple):
  """What a row makes of frozen rollouts.

  Attributes:
    metrics: the loss and all diagnostics by name.
    arrays: loss, dloss_dlogprobs_BL, ratio_BL (at the row's level), weights_BL
      (the corrections' multipliers) and clipped_BL (tokens whose gradient the
      objective cut); off the loss mask 0, 1, 1 and False.
  """

  metrics: dict[str, float]
  arrays: dict[str, np.ndarray]


def score_needs(
  algorithm: algorithm_lib.Algorithm, *, entropy_coefficient: float
) -> frozenset[str]:
  """The arrays without which a row cannot be scored."""
  needs = algorithm.needs | set(_SCORED)
  if algorithm.bounds.name == 'entropy_scaled' or entropy_coefficient:
    needs |= {'entropy_BL'}
  return frozenset(needs)


def score(
  algorithm: algorithm_lib.Algorithm,
  rollouts: frozen.Arrays,
  *,
  entropy_coefficient: float,
) -> Score:
  """Loss, gradient and diagnostics of a row.

  Args:
    algorithm: the row.
    rollouts: from `frozen.select`, with what `score_needs` names; a batch
      without a row, a token or a loss mask gives zeros.
    entropy_coefficient: of the entropy bonus, which adds to the loss and, not
      depending on `logprobs_BL` here, nothing to the gradient.
  """
  shape = rollouts['loss_mask_BL'].shape
  arrays = frozen.nonempty(rollouts)
  zeros_BL = np.zeros_like(arrays['logprobs_BL'])
  with_entropy = 'entropy_BL' in arrays
  found, diagnostics, metrics = jax.device_get(
    _score(
      algorithm,
      frozen.token_batch(arrays),
      arrays['logprobs_BL'],
      arrays['entropy_BL'] if with_entropy else zeros_BL,
      entropy_coefficient,
      num_turns=frozen.num_turns(arrays),
    )
  )
  metrics = {name: float(x) for name, x in metrics.items()}
  metrics |= diagnostics_lib.summarize(diagnostics)
  if not with_entropy:
    del metrics['actor/entropy']  # not measured, which is not 0
  metrics = {'loss': float(found['loss'])} | metrics  # it comes first
  return Score(metrics, {name: _cut(x, shape) for name, x in found.items()})


@functools.partial(jax.jit, static_argnames='num_turns')
def _score(
  algorithm, batch, logprobs_BL, entropy_BL, entropy_coefficient, *, num_turns
):
  """(arrays, diagnostics, scalar metrics) on the device."""

  def parts(logprobs_BL):
    loss = losses.policy_loss(
      algorithm,
      logprobs_BL,
      entropy_BL,
      batch,
      statistics=None,
      count=None,
      entropy_coefficient=entropy_coefficient,
      num_turns=num_turns,
    )
    return {name: getattr(loss, name) for name in _HEADS}, loss

  heads, pull, loss = jax.vjp(parts, logprobs_BL, has_aux=True)
  gradient_BL, correction = gradients_lib.combine(
    algorithm,
    {
      name: pull(
        {
          head: jnp.asarray(head in wanted, x.dtype)
          for head, x in heads.items()
        }
      )[0]
      for name, wanted in gradients_lib.pull_backs(algorithm).items()
    },
  )
  diagnostics = diagnostics_lib.policy_diagnostics(
    algorithm, loss, logprobs_BL, entropy_BL, batch, num_turns=num_turns
  )
  metrics = {
    'actor/pg_loss': loss.policy,
    'actor/kl_loss': loss.kl,
    'actor/grad_norm': jnp.sqrt(jnp.sum(jnp.square(gradient_BL))),
    **correction,
  }
  if batch.sampler_logprobs_BL is not None:
    metrics |= mismatch_metrics.measure(
      batch.old_logprobs_BL, batch.sampler_logprobs_BL, batch.loss_mask_BL
    )
  arrays = {
    'loss': loss.loss,
    'dloss_dlogprobs_BL': gradient_BL,
    'ratio_BL': loss.ratio_BL,
    'weights_BL': loss.weights_BL,
    'clipped_BL': loss.cut_BL,
  }
  return arrays, diagnostics, metrics


class Estimate(typing.NamedTuple):
  """What an estimator makes of frozen rollouts.

  Attributes:
    metrics: {advantages,returns}/{mean,std,min,max} over the loss mask; std is
      the root of the unbiased variance.
    arrays: advantages_BL, returns_BL and value_mask_BL.
  """

  metrics: dict[str, float]
  arrays: dict[str, np.ndarray]


def build_estimator(options: Mapping) -> typing.Any:
  """The block of an estimator's options.

  Raises:
    ValueError: every option that is wrong, one line each.
  """
  problems = options_lib.check(blocks.ADVANTAGES, options, 'advantage')
  if problems:
    raise ValueError('\n'.join(problems))
  return options_lib.build(blocks.ADVANTAGES, options)


def advantages_needs(
  estimator: typing.Any, rollouts: frozen.Arrays, *, compares: bool
) -> frozenset[str]:
  """The arrays without which an estimator cannot be had.

  Args:
    estimator: from `build_estimator`.
    rollouts: from `frozen.load`. The values are the old ones, of the model
      before the first update; a file without them has one kind only.
    compares: whether it compares the rows of a group.
  """
  needs = {'rewards_BL', 'loss_mask_BL', 'turn_ids_BL'}
  if estimator.name in advantages_lib.USES_VALUES:
    only = 'values_BL' in rollouts and 'old_values_BL' not in rollouts
    needs.add('values_BL' if only else 'old_values_BL')
  if estimator.name in advantages_lib.USES_STATES:
    needs.add('state_ids_BL')
  if compares:
    needs.add('group_ids_B')
  return frozenset(needs)


def estimate_problems(
  estimator: typing.Any, rollouts: frozen.Arrays
) -> list[str]:
  """What an estimator cannot be had of, one line each.

  Turn ids that decrease within a row (a turn would have no beginning), and
  values of observation tokens that are read and not finite.
  """
  problems = []
  ids_BL = rollouts['turn_ids_BL']  # 0 off the loss mask
  highest_BL = np.maximum.accumulate(ids_BL, axis=1)
  wrong_BL = (ids_BL > 0) & (ids_BL < highest_BL)
  if wrong_BL.any():
    problems.append(
      frozen.where('turn_ids_BL: must not decrease in a row', wrong_BL)
    )
  options = estimator.arguments()
  if 'observation_tokens' in options:
    read = advantages_lib.OBSERVATION_TOKENS[options['observation_tokens']]
    read_BL = np.asarray(read(rollouts['loss_mask_BL']))
    for name in _VALUES & rollouts.keys():
      problems += frozen.not_finite(name, rollouts[name], read_BL)
  return problems


def estimate(estimator: typing.Any, rollouts: frozen.Arrays) -> Estimate:
  """Advantages and returns of the rewards as they are, no KL penalty in them.

  Args:
    estimator: from `build_estimator`.
    rollouts: from `frozen.select`, with what `advantages_needs` names; none
      of `estimate_problems`.
  """
  shape = rollouts['loss_mask_BL'].shape
  arrays = frozen.nonempty(rollouts)
  if 'values_BL' in arrays and 'old_values_BL' not in arrays:
    arrays['old_values_BL'] = arrays['values_BL']
  found, metrics = jax.device_get(
    _estimate(
      estimator,
      frozen.token_batch(arrays),
      num_turns=frozen.num_turns(arrays),
    )
  )
  return Estimate(
    {name: float(x) for name, x in metrics.items()},
    {name: _cut(x, shape) for name, x in found.items()},
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


def _cut(x: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
  """Without the row and the token that `frozen.nonempty` may have added."""
  return x[: shape[0], : shape[1]] if x.ndim == 2 else x
