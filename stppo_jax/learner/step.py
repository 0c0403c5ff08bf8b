"""One optimiser step on a minibatch: from a loss to new weights.

Reinforcement, supervised and preference training are three losses of one
signature (`policy_loss`, `offline_losses`):

    loss(params, microbatch, context, spec=...) -> (scalar, LossOutputs)

`update` is the step: it sums the gradients of the microbatches, each of them
`jax.value_and_grad` of the loss, clips their global norm and gives them to
Adam. What else a kind of training needs is chosen where programs are built, as
a `Method`.
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
  """The metrics and diagnostics of a loss; those of microbatches add up.

  Attributes:
    metrics: scalars.
    diagnostics: ratio statistics, see `diagnostics.merge`; () for losses
      without a ratio.
  """

  metrics: Tree
  diagnostics: Tree = ()


class Hyperparameters(NamedTuple):
  """Runtime inputs of an update; another value does not recompile.

  Attributes:
    loss: what the loss reads beside weights and rows.
    policy, value: numbers of the two optimisers.
    policy_learns: False updates the value model alone.
  """

  loss: Tree
  policy: optimizer_lib.Hyperparameters
  value: optimizer_lib.Hyperparameters
  policy_learns: Array | bool = True


class Method(NamedTuple):
  """How one kind of training gets its gradient.

  Attributes:
    context: maps (params, minibatch, microbatches, `Hyperparameters.loss`) to
      what the loss reads of the whole minibatch.
    loss: see the module's docstring.
    differentiate: `jax.value_and_grad`, or what takes its place for a loss that
      returns several terms.
    finish: maps (summed gradient, summed outputs with stacked diagnostics,
      `Hyperparameters.loss`) to gradient and outputs of the minibatch.
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

  An update changes nothing, and is counted in the metric `update/skipped`, if
  its loss, gradient, new weights or new moments are not finite, or if the norm
  of a gradient is above `skip_grad_norm`.

  Args:
    state: the state before the update, without its frozen weights; donate it.
    frozen: the base under adapters; {} where everything is trained.
    minibatch: the rows.
    hyperparameters: runtime inputs.
    packing: where the minibatch's trajectories are in rows that models see, by
      microbatch; None: one microbatch, in which each has a row.
    method: how the gradient is computed.
    spec: models and static sizes.
    optimizers: the optimisers.

  Returns:
    The new state, also without frozen weights, and the metrics.
  """
  # Frozen weights are an argument of their own because the state is donated,
  # and they must outlive the update. The cast serves all microbatches.
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
    context: what `method.context` returned for the whole minibatch.
    method, spec: see `update`.
    microbatches: arrays with leading axes (n, B / n): all microbatches of the
      minibatch, or some of them.

  Returns:
    The gradient, and the outputs with stacked diagnostics, for `Method.finish`;
    the sums of several calls add up.
  """
  loss = functools.partial(method.loss, spec=spec)

  def add(microbatch):
    # Only the trained weights are differentiated: a gradient of the frozen base
    # would be as large as the model.
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
  """Takes a step with both optimisers, or with neither if one is not sound.

  The policy also stays as it is if `policy_learns` is false, or if the gradient
  has no part for the policy.
  """
  # Both models are checked before either is replaced. Otherwise one of them
  # could be updated while the update of the other one is skipped.
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
  # A selection and not a branch: with donated arrays both are written in place,
  # and no host has to wait for the decision.
  new_state = state_lib.TrainState(
    state_lib.select(
      sound & hyperparameters.policy_learns, moved['policy'], state.policy
    ),
    state_lib.select(sound, moved['value'], state.value),
  )
  metrics['update/skipped'] = 1.0 - sound.astype(jnp.float32)
  return new_state, outputs._replace(metrics=metrics)


def summarize(outputs: Sequence[LossOutputs]) -> dict[str, float]:
  """Returns the metrics of a step: means over its updates, ratios pooled."""
  metrics, diagnostics = zip(*jax.device_get(outputs))
  means = {
    name: float(np.mean([update[name] for update in metrics]))
    for name in metrics[0]
  }
  # Sums are pooled before they are divided: a mean of the updates' means would
  # weigh the tokens of a small minibatch more.
  pooled = functools.reduce(diagnostics_lib.merge, diagnostics)
  return means | diagnostics_lib.summarize(pooled)


def exceeds_kl(update: LossOutputs, limit: float) -> bool:
  """Returns whether an update's KL estimate is above a limit.

  The estimate is the metric `actor/ppo_kl`, in nats per token. A limit of 0 is
  no limit.
  """
  return 0 < limit < summarize([update])['actor/ppo_kl']
