"""The lab: what a row makes of frozen rollouts.

B trajectories, L tokens. The whole file is one minibatch and one microbatch,
and the parameters are the log-probabilities themselves: what `score` gives is
d loss / d logprobs_BL, the gradient that a model would hand on to its weights.
With a clipping bias of norm 'gradient' it is the combination that the update
forms (see `rl.gradients`), the norm being that over log-probabilities.

Nothing is random and nothing is learned; a row takes a compilation and then
milliseconds.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.analysis import saved_batch
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import diagnostics as diagnostics_lib
from stppo_jax.rl import gradients as gradients_lib
from stppo_jax.rl import losses
from stppo_jax.rl import masking
from stppo_jax.rl import mismatch_metrics

_SCORED = (
  'turn_ids_BL',
  'loss_mask_BL',
  'logprobs_BL',
  'old_logprobs_BL',
  'advantages_BL',
)
# Read where they are there: they say more, and change nothing of the loss.
OPTIONAL_ARRAYS = ('entropy_BL', 'sentence_ids_BL', 'sampler_logprobs_BL')
_HEADS = ('policy', 'bias', 'other')  # of a `PolicyLoss`
# What corrections form of the batch, and show as a metric: no mere diagnostics.
_READ_BY_CORRECTIONS = {
  'clipping_bias': ('stab/norm_clipped', 'stab/norm_unclipped', 'stab/rho'),
}


class Score(typing.NamedTuple):
  """What a row makes of frozen rollouts.

  Attributes:
    metrics: the loss and all diagnostics by name. One that the row does not
      use may be too large for the precision, and then is not finite.
    arrays: loss, dloss_dlogprobs_BL, ratio_BL (at the row's level), weights_BL
      (the corrections' multipliers) and clipped_BL (tokens whose gradient the
      objective cut); off the loss mask 0, 1, 1 and False.
  """

  metrics: dict[str, float]
  arrays: dict[str, np.ndarray]


def required_arrays(
  algorithm: algorithm_lib.Algorithm, *, entropy_coefficient: float
) -> frozenset[str]:
  """The arrays without which a row cannot be scored."""
  needs = algorithm.needs | set(_SCORED)
  if algorithm.bounds.name == 'entropy_scaled' or entropy_coefficient:
    needs |= {'entropy_BL'}
  return frozenset(needs)


def score(
  algorithm: algorithm_lib.Algorithm,
  rollouts: saved_batch.Arrays,
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

  Raises:
    frozen.NotFinite: what the row makes of the batch is too large for the
      precision.
  """
  shape = rollouts['loss_mask_BL'].shape
  arrays = saved_batch.pad_empty(rollouts)
  zeros_BL = np.zeros_like(arrays['logprobs_BL'])
  with_entropy = 'entropy_BL' in arrays
  found, diagnostics, metrics = jax.device_get(
    _score(
      algorithm,
      saved_batch.token_batch(arrays),
      arrays['logprobs_BL'],
      arrays['entropy_BL'] if with_entropy else zeros_BL,
      entropy_coefficient,
      num_turns=saved_batch.num_turns(arrays),
    )
  )
  metrics = {name: float(x) for name, x in metrics.items()}
  with np.errstate(over='ignore', invalid='ignore'):  # seen by who reads them
    metrics |= diagnostics_lib.summarize(diagnostics)
  if not with_entropy:
    del metrics['actor/entropy']  # not measured, which is not 0
  metrics = {'loss': float(found['loss'])} | metrics  # it comes first
  saved_batch.check_finite(
    found
    | {
      name: np.asarray(metrics[name], zeros_BL.dtype)
      for correction in algorithm.correction.names
      if correction in _READ_BY_CORRECTIONS
      for name in _READ_BY_CORRECTIONS[correction]
    }
  )
  return Score(
    metrics, {name: saved_batch.unpad(x, shape) for name, x in found.items()}
  )


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
    'actor/grad_norm': _norm(gradient_BL),
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


def _norm(x: jax.Array) -> jax.Array:
  """|x|_2, finite where it fits: x is scaled before it is squared."""
  largest = jnp.max(jnp.abs(x))
  return largest * jnp.sqrt(jnp.sum(jnp.square(masking.divide(x, largest))))
