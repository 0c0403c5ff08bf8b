"""One optimiser step on a minibatch: from a loss to new weights.

Reinforcement, supervised and preference learning have losses of one signature
(`policy_loss`, `offline_losses`):

    loss(params, microbatch, context, spec=...) -> (scalar, LossOutputs)

`update` is the step. It computes the gradient of each microbatch with
`jax.value_and_grad`, sums these gradients, clips the global norm and calls the
optimiser. A `Method` holds the functions in which the kinds of training differ.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax.learner import minibatches as minibatches_lib
from stppo_jax.learner import model_roles
from stppo_jax.learner import optimizer as optimizer_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.rl import diagnostics as diagnostics_lib

Array = jax.Array
Tree = Any


class Spec(NamedTuple):
  """The models and the static sizes of a compiled update.

  Attributes:
    models: policy and value model.
    temperature: the sampling temperature.
    num_turns: the largest number of turns of a trajectory.
  """

  models: model_roles.Models
  temperature: float
  num_turns: int


class LossOutputs(NamedTuple):
  """The metrics and diagnostics of a loss.

  Attributes:
    metrics: scalars, which add up over microbatches.
    diagnostics: ratio statistics, see `diagnostics.merge`; () for losses
      without a ratio.
  """

  metrics: Tree
  diagnostics: Tree = ()


class Hyperparameters(NamedTuple):
  """Runtime inputs of an update; changing a number does not recompile.

  Attributes:
    loss: the inputs of the loss beside weights and rows.
    policy, value: the numbers of the two optimisers.
    policy_learns: whether the policy is updated. If it is false, only the value
      model is updated.
  """

  loss: Tree
  policy: optimizer_lib.Hyperparameters
  value: optimizer_lib.Hyperparameters
  policy_learns: Array | bool = True


class Method(NamedTuple):
  """The functions with which one kind of training computes its gradient.

  Attributes:
    context: maps (params, minibatch, microbatches, `Hyperparameters.loss`) to
      the data of the whole minibatch that the loss reads.
    loss: see the module's docstring.
    differentiate: `jax.value_and_grad`, or the function that replaces it for a
      loss that returns several terms.
    finish: maps (gradient summed over microbatches, `LossOutputs` with summed
      metrics and stacked diagnostics, `Hyperparameters.loss`) to the gradient
      and the outputs of the minibatch.
  """

  context: Callable[..., Tree]
  loss: Callable[..., tuple[Any, LossOutputs]]
  differentiate: Callable[..., Callable[..., Any]] = jax.value_and_grad
  finish: Callable[..., Any] = lambda gradient, outputs, inputs: (
    gradient,
    outputs,
  )


def update(
  state: state_lib.TrainState,
  frozen: Tree,
  minibatch: Tree,
  hyperparameters: Hyperparameters,
  packing: batch_lib.Packing | None = None,
  *,
  method: Method,
  spec: Spec,
  optimizers: state_lib.Optimizers,
) -> tuple[state_lib.TrainState, LossOutputs]:
  """Updates the models on one minibatch.

  The update is skipped if its loss, gradient, new weights or new moments are
  not finite, or if the norm of a gradient is above `skip_grad_norm`. A skipped
  update leaves the state as it is and is counted in the metric
  `update/skipped`.

  Args:
    state: the state before the update, without its frozen weights; the caller
      donates it.
    frozen: the base under adapters; {} without adapters.
    minibatch: the rows.
    hyperparameters: runtime inputs.
    packing: the rows of each microbatch, and where the trajectories stand in
      packed rows. With None the minibatch is one microbatch, and each
      trajectory has a row of its own.
    method: how the gradient is computed.
    spec: models and static sizes.
    optimizers: the optimisers.

  Returns:
    The new state, also without frozen weights, and the metrics.
  """
  # Frozen weights are a separate argument, because the state is donated, and
  # the frozen weights must outlive the update. The cast is made once for all
  # microbatches.
  params = spec.models.cast(state.with_frozen(frozen).params)
  inputs = hyperparameters.loss
  microbatches = minibatches_lib.split(minibatch, packing)
  context = method.context(params, minibatch, microbatches, inputs, spec=spec)
  gradient, outputs = sum_gradients(
    params, microbatches, context, method=method, spec=spec
  )
  gradient, outputs = method.finish(gradient, outputs, inputs)
  return apply_gradients(
    state, gradient, outputs, hyperparameters, optimizers=optimizers
  )


def sum_gradients(
  params: model_roles.Params,
  microbatches: Tree,
  context: Tree,
  *,
  method: Method,
  spec: Spec,
) -> tuple[Tree, LossOutputs]:
  """Sums gradients and metrics over microbatches.

  Args:
    params: the weights, from `Models.cast`.
    context: the result of `method.context` for the whole minibatch.
    method, spec: see `update`.
    microbatches: all microbatches of the minibatch, or some of them, stacked by
      `minibatches.split`.

  Returns:
    The summed gradient, and `LossOutputs` with summed metrics and stacked
    diagnostics, for `Method.finish`. Gradients and metrics of several calls may
    be added.
  """
  loss = functools.partial(method.loss, spec=spec)

  def add(microbatch):
    # Only the trained weights are differentiated, because a gradient of the
    # frozen base would be as large as the model.
    of_trained = lambda trained: loss(
      params._replace(trained=trained), microbatch, context
    )
    differentiated = method.differentiate(of_trained, has_aux=True)
    (_, outputs), gradient = differentiated(params.trained)
    gradient = minibatches_lib.to_accumulator(gradient, spec.models.policy.mesh)
    return (gradient, outputs.metrics), outputs.diagnostics

  (gradient, metrics), diagnostics = minibatches_lib.accumulate(
    add, microbatches
  )
  return gradient, LossOutputs(metrics, diagnostics)


def apply_gradients(
  state: state_lib.TrainState,
  gradient: model_roles.Trained,
  outputs: LossOutputs,
  hyperparameters: Hyperparameters,
  *,
  optimizers: state_lib.Optimizers,
) -> tuple[state_lib.TrainState, LossOutputs]:
  """Takes both optimisers' steps, or neither step if one is not sound.

  `optimizer.is_sound` says what a sound step is. The policy also stays as it is
  if `policy_learns` is false, or if the policy's gradient is None.
  """
  # Both models are checked before either is replaced. Otherwise one model could
  # be updated while the update of the other one is skipped.
  metrics = dict(outputs.metrics)
  sound, moved = jnp.asarray(True), {}
  for role, prefix in (('policy', 'actor'), ('value', 'critic')):
    moved[role] = getattr(state, role)
    if getattr(gradient, role) is not None:
      moved[role], role_is_sound, report = state_lib.take_step(
        getattr(optimizers, role),
        getattr(state, role),
        getattr(gradient, role),
        getattr(hyperparameters, role),
        loss=outputs.metrics,
      )
      sound &= role_is_sound
      metrics |= {f'{prefix}/{name}': x for name, x in report.items()}
  # The new or the old arrays are selected without a branch. So no host waits
  # for the decision, and the donated arrays are overwritten in place.
  new_state = state_lib.TrainState(
    state_lib.select(
      sound & hyperparameters.policy_learns, moved['policy'], state.policy
    ),
    state_lib.select(sound, moved['value'], state.value),
  )
  metrics['update/skipped'] = 1.0 - sound.astype(jnp.float32)
  return new_state, outputs._replace(metrics=metrics)


def summarize(outputs: Sequence[LossOutputs]) -> dict[str, float]:
  """Returns the metrics of a step from the outputs of its updates.

  Scalar metrics are averaged over the updates. Diagnostics of ratios are formed
  over the tokens of all updates together.
  """
  metrics, diagnostics = zip(*jax.device_get(outputs))
  means = {
    name: float(np.mean([update[name] for update in metrics]))
    for name in metrics[0]
  }
  # Diagnostics are merged as sums over tokens and divided afterwards. The mean
  # of the updates' means would weigh the tokens of a small minibatch more.
  pooled = functools.reduce(diagnostics_lib.merge, diagnostics)
  return means | diagnostics_lib.summarize(pooled)


def exceeds_kl(update: LossOutputs, limit: float) -> bool:
  """Returns whether an update's KL estimate is above a limit.

  The estimate is the metric `actor/ppo_kl`, in nats per token. The limit 0
  means that there is no limit.
  """
  return 0 < limit < summarize([update])['actor/ppo_kl']
