"""The loss of a value model that learns alone.

In the further passes of `updates.value_epochs` the policy stays as it is. Their
program does not run it, and its gradient, which is 0, is dropped.

B rows of a microbatch or of a minibatch, L tokens.
"""

import jax

from stppo_jax import batch as batch_lib
from stppo_jax.learner import model_roles
from stppo_jax.learner import policy_loss
from stppo_jax.learner import step as step_lib

Array = jax.Array


def value_loss(
  params: model_roles.Params,
  microbatch: batch_lib.TokenBatch,
  context: policy_loss.Context,
  *,
  spec: step_lib.Spec,
) -> tuple[Array, step_lib.LossOutputs]:
  """Returns the share of a microbatch in the minibatch's value loss.

  The arguments are those of `policy_loss.policy_loss`. Values are weighted
  equally, also under an algorithm whose corrections weight them.
  """
  inputs = context.inputs
  values_BL = policy_loss.values(params, microbatch, inputs=inputs, spec=spec)
  loss, metrics = policy_loss.value_term(values_BL, microbatch, context)
  return loss, step_lib.LossOutputs(metrics)


def context_of(
  params: model_roles.Params,
  minibatch: batch_lib.TokenBatch,
  microbatches: batch_lib.TokenBatch,
  inputs: policy_loss.Inputs,
  *,
  spec: step_lib.Spec,
) -> policy_loss.Context:
  """Returns the numbers of a minibatch that its microbatches read."""
  del params, microbatches  # no statistics are read
  return policy_loss.join_context(minibatch, inputs, None, spec=spec)


def finish(
  gradient: model_roles.Trained,
  outputs: step_lib.LossOutputs,
  inputs: policy_loss.Inputs,
) -> tuple[model_roles.Trained, step_lib.LossOutputs]:
  """Leaves out the gradient of the policy, which is 0 everywhere."""
  del inputs
  return gradient._replace(policy=None), outputs


METHOD = step_lib.Method(context_of, value_loss, finish=finish)
