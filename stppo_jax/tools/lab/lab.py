"""Computes the loss and the gradient of an algorithm on a saved batch.

B trajectories, L tokens. The whole batch is one minibatch and one microbatch.
The log-probabilities take the place of parameters, so the gradient is
d loss / d logprobs_BL, which backpropagation would pass on to a model's
weights. If the algorithm corrects the clipping bias with norm 'gradient', the
gradient is divided by the norm of the bias as in an update (see
`rl.clipping_bias`). This norm is taken over the log-probabilities instead of
the weights.

Nothing is random and nothing is trained. An algorithm needs one compilation and
then takes milliseconds.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import clipping_bias as clipping_bias_lib
from stppo_jax.rl import corrections
from stppo_jax.rl import diagnostics as diagnostics_lib
from stppo_jax.rl import losses
from stppo_jax.rl import masking
from stppo_jax.rl import turn_advantages
from stppo_jax.tools.lab import saved_batch

_ALWAYS_REQUIRED = (
  'turn_ids_BL',
  'loss_mask_BL',
  'logprobs_BL',
  'old_logprobs_BL',
  'advantages_BL',
)
# If an array of this list is not in `required_arrays`, it only adds metrics.
OPTIONAL_ARRAYS = ('entropy_BL', 'sentence_ids_BL', 'sampler_logprobs_BL')
_TURN_Z = 'turn_z_BL'
_MAY_BE_INFINITE = ('low_BL', 'high_BL')


def required_arrays(
  algorithm: algorithm_lib.Algorithm, *, entropy_coefficient: float
) -> frozenset[str]:
  """Returns the names of the arrays that `loss_and_gradient` reads."""
  names = algorithm.needs | set(_ALWAYS_REQUIRED)
  # `_differentiate` computes turn_z_BL from two other arrays.
  if _TURN_Z in names:
    names = names - {_TURN_Z} | {'rewards_BL', 'group_ids_B'}
  if entropy_coefficient:
    names |= {'entropy_BL'}
  return frozenset(names)


def loss_and_gradient(
  algorithm: algorithm_lib.Algorithm,
  arrays: saved_batch.Arrays,
  *,
  entropy_coefficient: float,
) -> saved_batch.Result:
  """Returns the loss, the gradient and the metrics of an algorithm.

  The metrics are the loss and all diagnostics. A metric that the algorithm does
  not use may be too large for the precision, and is then not finite.

  The arrays are loss, dloss_dlogprobs_BL, ratio_BL (at the algorithm's level),
  weights_BL (the multipliers of the corrections), clipped_BL (the tokens whose
  gradient the objective cut), and low_BL and high_BL (the bounds in force,
  which may be infinite). Off the loss mask, dloss_dlogprobs_BL is 0, ratio_BL
  and weights_BL are 1, and clipped_BL is False.

  Args:
    algorithm: the algorithm.
    arrays: the result of `saved_batch.select`, with the `required_arrays`. If
      the loss mask is false everywhere, the loss and the gradient are 0.
    entropy_coefficient: the coefficient of the entropy bonus. It changes the
      loss but not the gradient, because the entropy does not depend on
      `logprobs_BL` here.

  Raises:
    saved_batch.NotFinite: the loss, its gradient or a metric that a correction
      uses is too large for the precision.
  """
  # The loss takes entropies even if their coefficient is 0. If the batch has no
  # entropies, the loss gets zeros, and the metric of the entropy is removed
  # below.
  zeros_BL = np.zeros_like(arrays['logprobs_BL'])
  results, diagnostics, metrics = jax.device_get(
    _differentiate(
      algorithm,
      saved_batch.token_batch(arrays),
      arrays['logprobs_BL'],
      arrays.get('entropy_BL', zeros_BL),
      entropy_coefficient,
      num_turns=saved_batch.num_turns(arrays),
    )
  )
  metrics = {name: float(x) for name, x in metrics.items()}
  # A metric may overflow; the caller leaves out metrics that are not finite.
  with np.errstate(over='ignore', invalid='ignore'):
    metrics |= diagnostics_lib.summarize(diagnostics)
  if 'entropy_BL' not in arrays:
    del metrics['actor/entropy']  # the entropy is unknown, not 0
  metrics = {'loss': float(results['loss'])} | metrics  # the loss comes first
  saved_batch.check_finite(
    {name: x for name, x in results.items() if name not in _MAY_BE_INFINITE}
    | {
      name: np.asarray(metrics[name], zeros_BL.dtype)
      # A metric that a correction uses must be finite. Other metrics only
      # describe the batch, and may be infinite.
      for correction in algorithm.correction.names
      for name in corrections.CORRECTIONS[correction].metrics
    }
  )
  return saved_batch.Result(metrics, results)


@functools.partial(jax.jit, static_argnames='num_turns')
def _differentiate(
  algorithm, batch, logprobs_BL, entropy_BL, entropy_coefficient, *, num_turns
):
  """Returns (arrays by name, diagnostics, metrics by name), on the device."""
  if _TURN_Z in algorithm.needs:
    z_BL = turn_advantages.turn_z(batch.rewards_BL, batch, num_turns=num_turns)
    batch = batch.replace(turn_z_BL=z_BL)

  def loss_terms(logprobs_BL):
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
    return clipping_bias_lib.LossTerms(loss.policy, loss.bias, loss.other), loss

  def total(logprobs_BL):
    terms, loss = loss_terms(logprobs_BL)
    return terms.policy + terms.other, loss

  # The metric of this norm exists for every algorithm. It is 0 if the gradient
  # is not divided by the norm.
  bias_norm = jnp.zeros(())
  # The division needs a separate gradient of the bias, so the terms of the loss
  # are differentiated one by one. Without the division, there is one backward
  # pass.
  if algorithm.divides_by_bias_norm:
    gradients, loss = clipping_bias_lib.term_gradients(loss_terms, logprobs_BL)
    gradient_BL, bias_norm = clipping_bias_lib.divide_by_bias_norm(
      gradients, floor=algorithm.correction.clipping_bias.floor
    )
  else:
    gradient_BL, loss = jax.grad(total, has_aux=True)(logprobs_BL)
  diagnostics = diagnostics_lib.policy_diagnostics(
    algorithm, loss, logprobs_BL, entropy_BL, batch, num_turns=num_turns
  )
  metrics = {
    'actor/pg_loss': loss.policy,
    'actor/kl_loss': loss.kl,
    'actor/grad_norm': _norm(gradient_BL),
    'stab/bias_grad_norm': bias_norm,
  }
  if batch.sampler_logprobs_BL is not None:
    metrics |= diagnostics_lib.mismatch(
      batch.old_logprobs_BL, batch.sampler_logprobs_BL, batch.loss_mask_BL
    )
    metrics |= diagnostics_lib.mismatch_of_segments(batch, num_turns=num_turns)
  arrays = {
    'loss': loss.loss,
    'dloss_dlogprobs_BL': gradient_BL,
    'ratio_BL': loss.ratio_BL,
    'weights_BL': loss.weights_BL,
    'clipped_BL': loss.cut_BL,
    # Bounds are a single number, or a number for each token. In a file they
    # always have a number for each token.
    'low_BL': jnp.broadcast_to(loss.low, logprobs_BL.shape),
    'high_BL': jnp.broadcast_to(loss.high, logprobs_BL.shape),
  }
  return arrays, diagnostics, metrics


def _norm(x: jax.Array) -> jax.Array:
  """Returns the Euclidean norm of an array."""
  largest = jnp.max(jnp.abs(x))
  # Without the division, the squares could overflow although the norm is
  # finite.
  return largest * jnp.sqrt(jnp.sum(jnp.square(masking.divide(x, largest))))
