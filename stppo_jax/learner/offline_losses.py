"""The losses of training without sampling: demonstrations, and pairs.

B rows, L tokens; Q pairs. An axis of size 2 has the preferred trajectory first,
and then the dispreferred trajectory.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.learner import forward
from stppo_jax.learner import model_roles
from stppo_jax.learner import step as step_lib
from stppo_jax.models import functional
from stppo_jax.models import modules
from stppo_jax.rl import preferences

Array = jax.Array


def sft_loss(
  params: model_roles.Params,
  microbatch: batch_lib.TokenBatch,
  count: Array,
  *,
  spec: step_lib.Spec,
) -> tuple[Array, step_lib.LossOutputs]:
  """Returns a microbatch's share of the mean negative log-likelihood.

  The mean is over the demonstrated tokens of the whole minibatch.

  Args:
    params: weights in the dtype of the activations.
    microbatch: packed demonstrations.
    count: the number of demonstrated tokens of the whole minibatch.
    spec: models and static sizes.
  """
  outputs = forward.token_outputs(
    spec.models.policy,
    spec.models.policy_weights(params),
    forward.inputs_of(microbatch),
    temperature=spec.temperature,
  )
  chosen_BL = jnp.where(microbatch.loss_mask_BL, outputs.logprobs_BL, 0.0)
  loss = -jnp.sum(chosen_BL) / count
  return loss, step_lib.LossOutputs({'sft/loss': loss})


def _count_tokens(params, minibatch, microbatches, inputs, *, spec) -> Array:
  del params, microbatches, inputs, spec
  return jnp.sum(minibatch.loss_mask_BL)


SFT = step_lib.Method(_count_tokens, sft_loss)


class PairInputs(NamedTuple):
  """The inputs of `tdpo_loss` beside weights and pairs.

  Attributes:
    reference: weights of the frozen reference; None means the base under the
      adapters.
    beta, alpha: see `preferences.preference_loss`.
  """

  reference: functional.Params | None
  beta: Array | float
  alpha: Array | float


def tdpo_loss(
  params: model_roles.Params,
  microbatch: batch_lib.PairBatch,
  inputs: PairInputs,
  *,
  name: str,
  spec: step_lib.Spec,
) -> tuple[Array, step_lib.LossOutputs]:
  """Returns the sum of the losses of the pairs; `_divide` makes the mean.

  Args:
    params: weights in the dtype of the activations.
    microbatch: the pairs.
    inputs: beta, alpha, and the reference in the dtype of the activations.
    name: one of `preferences.PREFERENCES`.
    spec: models and static sizes.
  """
  # From [Q, 2, ...] to rows: pair 0's preferred, pair 0's dispreferred, pair
  # 1's preferred, ... In this order each device keeps its own rows.
  packing = microbatch.packing
  rows = jax.tree.map(
    lambda x: x.reshape(-1, *x.shape[2:]), microbatch._replace(packing=None)
  )
  if packing is not None:
    packing = forward.of_pairs(packing, microbatch.lengths_Q2)
  # One function runs policy and reference, so that it can compare their
  # distributions over the vocabulary chunk by chunk. The distributions of all
  # tokens at the same time would need too much memory.
  policy, reference = spec.models.policy, inputs.reference
  assert reference is not None  # `_cast_reference` has replaced None
  outputs = forward.in_rows(
    lambda tokens_BL, **arrays: policy.divergence(
      spec.models.policy_weights(params),
      reference,
      tokens_BL,
      temperature=spec.temperature,
      **arrays,
    ),
    forward.Inputs(
      rows.tokens_Q2L,
      rows.lengths_Q2,
      rows.loss_mask_Q2L,
      rows.loss_positions_Q2M,
      packing=packing,
    ),
    policy.mesh,
  )
  logprobs, ref_logprobs, divergence = (
    x_BL.reshape(microbatch.tokens_Q2L.shape) for x_BL in outputs
  )
  sums = preferences.preference_loss(
    logprobs,
    ref_logprobs,
    divergence,
    jnp.asarray(microbatch.loss_mask_Q2L),
    name=name,
    beta=inputs.beta,
    alpha=inputs.alpha,
  )
  return sums.total, step_lib.LossOutputs(sums)


def _cast_reference(params, minibatch, microbatches, inputs, *, spec):
  """Returns the inputs with a reference in the dtype of the activations.

  The reference is cast once for all microbatches. If the reference is None, it
  becomes the base under the adapters.
  """
  del minibatch, microbatches
  dtype = spec.models.policy.config.dtype
  reference = params.frozen
  if inputs.reference is not None:
    reference = modules.cast(inputs.reference, dtype)
  return inputs._replace(reference=reference)


def _divide(gradient, outputs, inputs):
  """Divides the sums over a minibatch by the minibatch's number of pairs."""
  del inputs
  sums = outputs.metrics
  count = jnp.maximum(sums.count, 1)
  gradient, mean = jax.tree.map(lambda x: x / count, (gradient, sums))
  metrics = {
    'preference/loss': mean.total,
    'preference/margin': mean.margin,
    'preference/accuracy': mean.correct,
    'preference/pairs': sums.count,
  }
  for index, side in enumerate(('preferred', 'dispreferred')):
    metrics[f'preference/{side}/log_ratio'] = mean.log_ratio_2[index]
    metrics[f'preference/{side}/kl'] = mean.divergence_2[index]
  return gradient, step_lib.LossOutputs(metrics)


@functools.lru_cache
def tdpo(name: str) -> step_lib.Method:
  """Returns the `Method` that trains with a loss of `PREFERENCES`."""
  loss = functools.partial(tdpo_loss, name=name)
  return step_lib.Method(_cast_reference, loss, finish=_divide)
