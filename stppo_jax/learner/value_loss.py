"""The loss of a value model that learns alone, and the value warm-up.

In the additional epochs of `updates.value_epochs` the policy stays as it is.
The program of these epochs does not run the policy, and drops the policy's
gradient, which is 0. The steps of the warm-up do not update the policy, either.

B rows of a microbatch or of a minibatch, L tokens.
"""

import dataclasses

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

  For the arguments see `policy_loss.policy_loss`. All values have the same
  weight, also with an algorithm whose corrections weigh the value terms.
  """
  inputs = context.inputs
  values_BL = policy_loss.values(params, microbatch, inputs=inputs, spec=spec)
  loss, metrics = policy_loss.value_term(
    values_BL, microbatch, context, spec=spec
  )
  return loss, step_lib.LossOutputs(metrics)


def context_of(
  params: model_roles.Params,
  minibatch: batch_lib.TokenBatch,
  microbatches: batch_lib.TokenBatch,
  inputs: policy_loss.Inputs,
  *,
  spec: step_lib.Spec,
) -> policy_loss.Context:
  """Returns the data of the minibatch that the loss of a microbatch reads."""
  del params, microbatches  # only minibatch statistics need these arguments
  return policy_loss.join_context(minibatch, inputs, None, spec=spec)


def finish(
  gradient: model_roles.Trained,
  outputs: step_lib.LossOutputs,
  inputs: policy_loss.Inputs,
) -> tuple[model_roles.Trained, step_lib.LossOutputs]:
  """Replaces the gradient of the policy, which is 0 everywhere, by None."""
  del inputs
  return gradient._replace(policy=None), outputs


@dataclasses.dataclass
class Warmup:
  """Counts the steps of the warm-up, in which the policy stays as it is.

  The warm-up ends early once the explained variance has not risen for some
  steps. The explained variance is measured on a collection before the value
  model learns from it, so a rise does not come from remembering single
  dialogues.

  Attributes:
    steps: the largest number of steps of the warm-up.
    patience: the number of steps without a rise that ends the warm-up early; 0:
      the warm-up never ends early.
    best: the largest explained variance so far.
    best_step: the step with the largest explained variance.
    ended: the first step in which the policy learns if the warm-up ended early;
      None if it did not end early.
  """

  steps: int
  patience: int
  best: float = -1e9  # below any explained variance; JSON has no -inf
  best_step: int = 0
  ended: int | None = None

  @property
  def end(self) -> int:
    """The first step in which the policy learns, as far as is known.

    When `observe` ends the warm-up early, the present step becomes `end`.
    """
    return self.steps if self.ended is None else min(self.steps, self.ended)

  @property
  def record(self) -> dict[str, float | None]:
    """The fields that a checkpoint holds; the config holds the other fields."""
    return {
      'best': self.best,
      'best_step': self.best_step,
      'ended': self.ended,
    }

  def observe(self, step: int, explained: float) -> bool:
    """Records an explained variance; returns whether the warm-up ends early.

    Call this once in each step that comes before step `end`, in the order of
    the steps. From step `end` on, or if `patience` is 0, a call records nothing
    and returns False. If the result is True, the policy already learns in this
    step.

    Args:
      step: the training step, whose updates have not been made.
      explained: the explained variance of the step's collection.
    """
    if step >= self.end or not self.patience:
      return False
    if explained > self.best:
      self.best, self.best_step = explained, step
    stops = step - self.best_step >= self.patience
    if stops:
      self.ended = step
    return stops


METHOD = step_lib.Method(context_of, value_loss, finish=finish)
