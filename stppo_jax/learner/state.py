"""What training changes: weights and optimiser states.

Under LoRA a run holds one copy of the base. It is the frozen part of policy and
value model, which train adapters (and the value head), and the reference.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from stppo_jax.learner import optimizer as optimizer_lib
from stppo_jax.models import functional

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelState:
  """One model in training.

  Attributes:
    params: float32 weights that are trained: all, or adapters and heads.
    optimizer: the optimiser's moments.
    updates: int32 scalar, optimiser steps done; skipped ones do not count.
  """

  params: Tree
  optimizer: Tree
  updates: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """All that a checkpoint must hold on the device side.

  Attributes:
    policy: the policy.
    value: the value model; None where the advantages need none, or where the
      policy has the value head.
    published: in a checkpoint, the weights of earlier policies that steps to
      come are collected with, see `ahead`; no update knows of them.
    frozen: the base under adapters, in the dtype it is computed in; None where
      everything is trained. Never donated, nor in a checkpoint: a start makes
      it again.
  """

  policy: ModelState
  value: ModelState | None
  published: tuple[functional.Params, ...] = ()
  frozen: functional.Params | None = None


def join_frozen(
  model: functional.Model,
  frozen: functional.Params | None,
  params: functional.Params,
) -> functional.Params:
  """The tree that a model computes with.

  Args:
    model: the policy or the value model.
    frozen: of the state.
    params: of its `ModelState`, now or earlier.
  """
  return params if frozen is None else model.join_params(frozen, params)


def fresh(
  weights: functional.Params,
  key: jax.Array,
  *,
  policy: functional.Model,
  value: functional.Model | None,
  policy_optimizer: optimizer_lib.Optimizer,
  value_optimizer: optimizer_lib.Optimizer,
) -> TrainState:
  """The state before the first update; to be jitted, or asked for its shape.

  The value model starts from the policy's layers too. Value heads are zero.

  Args:
    weights: of a policy, without adapters; donate them: they become those of
      the state, or, in the dtype they come in, its frozen part.
    key: of the adapters.
    policy, value: models.
    policy_optimizer, value_optimizer: of them.

  Raises:
    ValueError: adapters for names that no layer has.
  """
  lora = policy.lora is not None

  def trained(model, number, optimizer):
    if lora:
      params = model.init_adapters(jax.random.fold_in(key, number))
    else:
      params = model.join_params(weights, {})
    if model.head != 'vocabulary':
      params = params | {
        'scalar_head': jnp.zeros((model.config.hidden_size, 1))
      }
    return ModelState(params, optimizer.init(params), jnp.zeros((), jnp.int32))

  return TrainState(
    policy=trained(policy, 0, policy_optimizer),
    value=None if value is None else trained(value, 1, value_optimizer),
    frozen=weights if lora else None,
  )
