"""The loss of reinforcement learning: policy, value and load-balance terms.

Every term is divided by a count of the whole minibatch, and the statistics that
the loss reads are formed over the whole minibatch. So splitting the minibatch
into microbatches does not change the loss. The only exception is the clipping
bias correction with the scope 'microbatch'.

B rows of a microbatch or of a minibatch, L tokens, X experts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.learner import forward
from stppo_jax.learner import minibatches as minibatches_lib
from stppo_jax.learner import model_roles
from stppo_jax.learner import step as step_lib
from stppo_jax.models import functional
from stppo_jax.models import heads
from stppo_jax.models import moe
from stppo_jax.rl import aggregation
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import clipping_bias
from stppo_jax.rl import diagnostics as diagnostics_lib
from stppo_jax.rl import losses
from stppo_jax.rl import masking
from stppo_jax.rl import values as values_lib

Array = jax.Array
Tree = Any


class Coefficients(NamedTuple):
  """Runtime numbers of the loss; changing a number does not recompile.

  Attributes:
    entropy: weight of the entropy bonus.
    value_clip: PPO's clip of a value: the largest distance from the old value.
    value: weight of the value loss if policy and value share a backbone.
    load_balance: weight of the load-balance loss of a policy with experts.
  """

  entropy: Array | float
  value_clip: Array | float
  value: Array | float
  load_balance: Array | float


class Inputs(NamedTuple):
  """The inputs of the loss beside weights and rows.

  Attributes:
    algorithm: the algorithm, whose numbers may be traced.
    coefficients: the coefficients of the terms.
  """

  algorithm: algorithm_lib.Algorithm
  coefficients: Coefficients


class Context(NamedTuple):
  """The data of the whole minibatch that the loss of a microbatch reads.

  Attributes:
    inputs: see `Inputs`.
    minibatch: all rows of the minibatch, for the load of the experts.
    count: the policy loss's denominator, see `aggregation`.
    value_count: the value loss's denominator: the number of trained values, at
      least 1.
    statistics: see `losses.minibatch_statistics`. With None the policy loss
      forms statistics of its microbatch, if the algorithm needs statistics.
  """

  inputs: Inputs
  minibatch: batch_lib.TokenBatch
  count: Array
  value_count: Array
  statistics: losses.Statistics | None


def policy_loss(
  params: model_roles.Params,
  microbatch: batch_lib.TokenBatch,
  context: Context,
  *,
  spec: step_lib.Spec,
) -> tuple[Array, step_lib.LossOutputs]:
  """Returns the share of a microbatch in the minibatch's loss.

  Args:
    params: weights in the dtype of the activations.
    microbatch: annotated rows.
    context: the result of `context_of` for the rows' minibatch.
    spec: models and static sizes.
  """
  terms, outputs = loss_terms(params, microbatch, context, spec=spec)
  return terms.policy + terms.other, outputs


def loss_terms(
  params: model_roles.Params,
  microbatch: batch_lib.TokenBatch,
  context: Context,
  *,
  spec: step_lib.Spec,
) -> tuple[clipping_bias.LossTerms, step_lib.LossOutputs]:
  """Returns the terms of `policy_loss` before they are added.

  For the arguments see `policy_loss`. The bias term is 0 if the algorithm does
  not divide by the norm of that term's gradient.
  """
  algorithm, coefficients = context.inputs
  # If the value head is trained at observations, too, it computes values at all
  # tokens, and otherwise only at the loss positions.
  everywhere = algorithm.trains_values_at_observations
  outputs = _policy_outputs(
    params, microbatch, spec=spec, values_everywhere=everywhere
  )
  policy = losses.policy_loss(
    algorithm,
    outputs.logprobs_BL,
    outputs.entropy_BL,
    microbatch,
    statistics=context.statistics,
    count=context.count,
    entropy_coefficient=coefficients.entropy,
    num_turns=spec.num_turns,
  )
  diagnostics = diagnostics_lib.policy_diagnostics(
    algorithm,
    policy,
    outputs.logprobs_BL,
    outputs.entropy_BL,
    microbatch,
    num_turns=spec.num_turns,
  )
  # The clipping-bias correction divides the gradient of the policy term alone.
  # So the value and load-balance terms are added to `other`, the sum of the
  # entropy and KL terms.
  other = policy.other
  metrics = {'actor/pg_loss': policy.policy, 'actor/kl_loss': policy.kl}

  found, value_coefficient = outputs.values, coefficients.value
  if spec.models.value is not None:
    found = values(params, microbatch, inputs=context.inputs, spec=spec)
    value_coefficient = 1.0  # this model has a learning rate of its own
  if found is not None:
    value, of_values = value_term(
      found,
      microbatch,
      context,
      spec=spec,
      weights_BL=policy.value_weights_BL,
    )
    other += value_coefficient * value
    metrics |= of_values
  if outputs.routing is not None:
    balance = _load_balance(
      outputs.routing.probs_BX,
      microbatch,
      context.minibatch,
      experts_per_token=spec.models.policy.config.num_experts_per_tok,
    )
    other += coefficients.load_balance * balance
    metrics['actor/load_balance'] = balance
  terms = clipping_bias.LossTerms(policy.policy, policy.bias, other)
  return terms, step_lib.LossOutputs(metrics, diagnostics)


def values(params, microbatch, *, inputs: Inputs, spec) -> heads.Values:
  """Returns the values of a value model with layers of its own."""
  return forward.values(
    spec.models.value,
    spec.models.value_weights(params),
    forward.inputs_of(microbatch),
    everywhere=inputs.algorithm.trains_values_at_observations,
  )


def value_term(
  found, microbatch, context: Context, *, spec, weights_BL=None
) -> tuple[Array, dict[str, Array]]:
  """Returns the share of a microbatch in the value loss, and scalar metrics."""
  value = values_lib.value_loss(
    found.values_BL,
    microbatch.values_BL,
    microbatch.returns_BL,
    microbatch.value_mask_BL,
    clip=context.inputs.coefficients.value_clip,
    weights_BL=weights_BL,
    bounds=spec.models.value_range,
    logprobs_BLY=found.logprobs_BLY,
  )
  loss, clipped = (
    x / context.value_count for x in (value.total, value.clipped)
  )
  return loss, {'critic/vf_loss': loss, 'critic/vf_clipfrac': clipped}


def context_of(
  params: model_roles.Params,
  minibatch: batch_lib.TokenBatch,
  microbatches: batch_lib.TokenBatch,
  inputs: Inputs,
  *,
  spec: step_lib.Spec,
) -> Context:
  """Returns the data of the minibatch that the loss of a microbatch reads.

  If the algorithm has minibatch statistics and there are several microbatches,
  an additional forward pass computes the outputs for the statistics.

  Args:
    params: weights in the dtype of the activations.
    minibatch: annotated rows.
    microbatches: the same rows, divided by `minibatches.split`.
    inputs: see `Inputs`.
    spec: models and static sizes.
  """
  # A single microbatch is the whole minibatch. `losses.policy_loss` then gets
  # statistics=None, and forms the statistics from the loss's forward pass.
  outputs, packing = None, microbatches.packing
  statistics = inputs.algorithm.uses_minibatch_statistics
  if statistics and packing is not None and len(packing.rows) > 1:
    outputs = minibatches_lib.join(
      outputs_of(params, microbatches, spec=spec),
      packing,
      len(minibatch.lengths_B),
    )
  return join_context(minibatch, inputs, outputs, spec=spec)


def outputs_of(
  params: model_roles.Params,
  microbatches: batch_lib.TokenBatch,
  *,
  spec: step_lib.Spec,
) -> tuple[Array, Array]:
  """Returns log-probabilities and entropy of n microbatches, each [n, rows, L].

  The forward pass is not differentiated. For the arguments see `context_of`.
  """

  def step(_, microbatch):
    outputs = _policy_outputs(params, microbatch, spec=spec)
    return None, (outputs.logprobs_BL, outputs.entropy_BL)

  _, outputs = jax.lax.scan(step, None, microbatches)
  return outputs


def join_context(
  minibatch: batch_lib.TokenBatch,
  inputs: Inputs,
  outputs: tuple[Array, Array] | None,
  *,
  spec: step_lib.Spec,
) -> Context:
  """Returns the context of a minibatch.

  Args:
    minibatch, inputs, spec: see `context_of`.
    outputs: log-probabilities and entropy [B, L], from which statistics are
      formed; with None no statistics are formed.
  """
  algorithm, statistics = inputs.algorithm, None
  if outputs is not None:
    statistics = losses.minibatch_statistics(
      algorithm, *outputs, minibatch, num_turns=spec.num_turns
    )
  _, count = aggregation.aggregate_weights(
    minibatch,
    num_turns=spec.num_turns,
    name=algorithm.aggregate.name,
    **algorithm.aggregate.arguments(),
  )
  value_count = jnp.maximum(jnp.sum(minibatch.value_mask_BL), 1)
  return Context(inputs, minibatch, count, value_count, statistics)


def finish(
  gradient: model_roles.Trained,
  outputs: step_lib.LossOutputs,
  inputs: Inputs,
) -> tuple[model_roles.Trained, step_lib.LossOutputs]:
  """Merges the diagnostics of the microbatches; keeps the gradient as it is."""
  del inputs
  return gradient, _with_bias_norm(outputs, jnp.zeros(()))


def differentiate_terms(loss_terms: Callable[..., Any], *, has_aux: bool):
  """Returns a function that differentiates each term of a loss separately.

  The function replaces `jax.value_and_grad` for algorithms that divide the
  gradient of the policy term by the norm of the gradient of the bias term. The
  two terms do not depend on the value model, so only their gradients with
  respect to the policy's weights are kept.

  Args:
    loss_terms: maps trained weights to (`clipping_bias.LossTerms`, outputs).
    has_aux: must be True, because `loss_terms` also returns outputs.
  """
  assert has_aux  # the argument is there because `jax.value_and_grad` has it

  def differentiated(trained: model_roles.Trained):
    gradients, outputs = clipping_bias.term_gradients(loss_terms, trained)
    gradients = gradients._replace(
      policy=gradients.policy.policy, bias=gradients.bias.policy
    )
    # No caller reads the value of the loss. The metrics have its terms.
    return (None, outputs), gradients

  return differentiated


def divide_by_bias_norm(
  gradients: clipping_bias.LossTerms,
  outputs: step_lib.LossOutputs,
  inputs: Inputs,
) -> tuple[model_roles.Trained, step_lib.LossOutputs]:
  """Divides the policy term's gradient by the bias term's gradient norm.

  A norm below the option `floor` is replaced by `floor`. In `BIAS_NORM_METHOD`
  this function takes the place of `finish`.
  """
  policy, norm = clipping_bias.divide_by_bias_norm(
    gradients._replace(other=gradients.other.policy),
    floor=inputs.algorithm.correction.clipping_bias.floor,
  )
  gradient = gradients.other._replace(policy=policy)
  return gradient, _with_bias_norm(outputs, norm)


def _with_bias_norm(outputs: step_lib.LossOutputs, norm: Array):
  return step_lib.LossOutputs(
    outputs.metrics | {'stab/bias_grad_norm': norm},
    diagnostics_lib.merge_stacked(outputs.diagnostics),
  )


METHOD = step_lib.Method(context_of, policy_loss, finish=finish)
# For algorithms that divide by the norm of the bias term's gradient.
BIAS_NORM_METHOD = step_lib.Method(
  context_of, loss_terms, differentiate_terms, divide_by_bias_norm
)


def _policy_outputs(
  params: model_roles.Params,
  microbatch: batch_lib.TokenBatch,
  *,
  spec: step_lib.Spec,
  values_everywhere: bool = False,
) -> functional.TokenOutputs:
  return forward.token_outputs(
    spec.models.policy,
    spec.models.policy_weights(params),
    forward.inputs_of(microbatch),
    temperature=spec.temperature,
    # Without `values_everywhere`, only loss positions get values.
    values_everywhere=values_everywhere,
  )


def _load_balance(
  probs_BX: Array,
  microbatch: batch_lib.TokenBatch,
  minibatch: batch_lib.TokenBatch,
  *,
  experts_per_token: int,
) -> Array:
  """Returns a microbatch's share of `moe.load_balance`; the shares add up.

  The load of an expert is the number of its visits. It was counted over the
  minibatch in the old policy's pass and has no gradient. With routing replay,
  and before the first update, the present pass has the same load. Rows without
  loss tokens, such as failed trajectories, are not counted.

  Args:
    probs_BX: router probabilities of the microbatch, see `moe.Routing`; the
      gradient flows through them.
    microbatch: the rows of `probs_BX`.
    minibatch: all rows, with `expert_visits_BX`.
    experts_per_token: the number of experts that each token visits in a layer.
  """
  visits_BX = _valid_rows(minibatch.expert_visits_BX, minibatch)
  visits_X = jnp.sum(visits_BX, axis=0)
  probs_X = jnp.sum(_valid_rows(probs_BX, microbatch), axis=0)
  tokens = jnp.sum(visits_X) / experts_per_token
  return moe.load_balance(visits_X, probs_X, tokens)


def _valid_rows(x_BX: Array, batch: batch_lib.TokenBatch) -> Array:
  """Returns x, with 0 in rows that have no loss tokens."""
  valid_B = jnp.any(batch.loss_mask_BL, axis=1)
  return masking.select(x_BX, jnp.broadcast_to(valid_B[:, None], x_BX.shape))
