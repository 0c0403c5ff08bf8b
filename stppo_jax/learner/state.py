"""The state that training changes: weights and optimiser states.

With LoRA a run holds one copy of the base weights. The copy is the frozen base
of both the policy and the value model. The trained weights of a model are then
its adapters and, if it has one, its value head. If `model.reference_path` is
empty, the copy is also the reference policy.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.learner import model_roles
from stppo_jax.learner import optimizer as optimizer_lib
from stppo_jax.models import functional

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelState:
  """One model in training.

  Attributes:
    params: the trained weights in float32: all weights or, with LoRA, adapters
      and heads.
    optimizer: the optimiser's moments.
    updates: int32 scalar, the number of optimiser steps, without skipped steps.
  """

  params: Tree
  optimizer: Tree
  updates: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """All arrays that a run needs to continue.

  Attributes:
    policy: the policy.
    value: the value model; None if the advantages need no values, or if the
      policy has the value head.
    published: the trained weights of the earlier policies that collect
      prefetched steps, see `rollout/prefetch.py`; () outside checkpoints.
    replayed: the collections that the value model repeats, see
      `value_training`; () outside checkpoints.
    frozen: see `Params`. It is never donated. It is in no checkpoint, because
      every start reads it again.
  """

  policy: ModelState
  value: ModelState | None
  published: tuple[functional.Params, ...] = ()
  replayed: tuple[batch_lib.TokenBatch, ...] = ()
  frozen: functional.Params = dataclasses.field(default_factory=dict)

  @property
  def params(self) -> model_roles.Params:
    """The weights that the models compute with."""
    value = None if self.value is None else self.value.params
    trained = model_roles.Trained(self.policy.params, value)
    return model_roles.Params(trained, self.frozen)

  def with_frozen(self, frozen: functional.Params) -> 'TrainState':
    """Returns the state with another frozen base; {} leaves the base out."""
    return dataclasses.replace(self, frozen=frozen)


class Optimizers(NamedTuple):
  """The optimisers of both models, see `optimizer.from_config`."""

  policy: optimizer_lib.Optimizer
  value: optimizer_lib.Optimizer


def init(
  weights: functional.Params,
  key: jax.Array,
  adapters: functional.Params | None = None,
  value_weights: functional.Params | None = None,
  *,
  models: model_roles.Models,
  optimizers: Optimizers,
) -> TrainState:
  """Returns the state before the first update.

  Call this function under jit, or trace its shapes with `jax.eval_shape`. The
  weights of a value head are 0 at the start.

  Args:
    weights: a policy's weights without adapters, to be donated. They become the
      trained weights or, with adapters, the frozen base in the same dtype.
    key: the random key of the adapters.
    adapters: the adapters that both models start from; with None each model
      gets new adapters.
    value_weights: the weights that the value model starts from, to be donated;
      with None the value model starts from `weights`.
    models: policy and value model.
    optimizers: the optimisers of both models.

  Raises:
    ValueError: the targets of the adapters match no layer.
  """
  lora = models.policy.lora is not None

  def init_model(model, number, optimizer, weights=weights):
    # Without adapters both models get the same arrays here. Under jit these
    # arrays become two outputs, so the value model has its own weights.
    if adapters is not None:
      params = dict(adapters)
    elif lora:
      params = model.init_adapters(jax.random.fold_in(key, number))
    else:
      params = model.join_params(weights, {})
    if model.head != 'vocabulary':
      # A value head that is not trained yet should return 0.
      shape = model.config.hidden_size, model.config.value_outputs
      params = params | {'scalar_head': jnp.zeros(shape)}
    return ModelState(params, optimizer.init(params), jnp.zeros((), jnp.int32))

  value = None
  if models.value is not None:
    start = weights if value_weights is None else value_weights
    value = init_model(models.value, 1, optimizers.value, start)
  return TrainState(
    policy=init_model(models.policy, 0, optimizers.policy),
    value=value,
    frozen=weights if lora else {},
  )


def take_step(
  optimizer: optimizer_lib.Optimizer,
  model: ModelState,
  gradient: Tree,
  hyperparameters: optimizer_lib.Hyperparameters,
  *,
  loss: Tree,
) -> tuple[ModelState, jax.Array, dict[str, jax.Array]]:
  """Takes an optimiser step of one model.

  Args:
    optimizer: see `optimizer.from_config`.
    model: the model before the step.
    gradient: float32, with the tree structure of the weights.
    hyperparameters: the numbers of the step; they may be traced.
    loss: scalars that must be finite, such as the terms of the loss.

  Returns:
    The model after the step, whether the step is sound (`optimizer.is_sound`),
    and the metrics of `optimizer.apply_gradient`.
  """
  params, moments, metrics = optimizer_lib.apply_gradient(
    optimizer,
    model.params,
    model.optimizer,
    gradient,
    model.updates,
    hyperparameters,
  )
  new = ModelState(params, moments, model.updates + 1)
  sound = optimizer_lib.is_sound(
    new, metrics['grad_norm'], loss, hyperparameters
  )
  return new, sound, metrics


def select(condition: jax.Array, new: Tree, old: Tree) -> Tree:
  """Returns the new state if the condition holds, otherwise the old one."""
  return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)
