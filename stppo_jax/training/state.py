"""What training changes: weights and optimiser states.

Under LoRA a run holds one copy of the base. It is the frozen part of policy and
value model, which train adapters (and the value head), and the reference.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from stppo_jax.models import functional
from stppo_jax.training import optimizer as optimizer_lib

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
    frozen: the base under adapters; None where everything is trained. Never
      donated, nor in a checkpoint: a start makes it again.
  """

  policy: ModelState
  value: ModelState | None
  published: tuple[functional.Params, ...] = ()
  frozen: functional.Params | None = None


def whole(
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
  return params if frozen is None else model.joined(frozen, params)


def fresh(
  make_policy: Callable[[], functional.Params],
  make_value: Callable[[functional.Params], functional.Params] | None,
  policy_optimizer: optimizer_lib.Optimizer,
  value_optimizer: optimizer_lib.Optimizer,
) -> TrainState:
  """The state before the first update; to be jitted, or asked for its shape.

  Args:
    make_policy: weights of the policy.
    make_value: weights of the value model, given those of the policy; None
      for no value model.
    policy_optimizer: of the policy.
    value_optimizer: of the value model.
  """
  policy = make_policy()
  value = None
  if make_value is not None:
    params = make_value(policy)
    value = ModelState(params, value_optimizer.init(params), _zero())
  return TrainState(
    policy=ModelState(policy, policy_optimizer.init(policy), _zero()),
    value=value,
  )


def value_from_policy(
  model: functional.Model, key: jax.Array, policy: functional.Params
) -> functional.Params:
  """A value model that starts from the policy's backbone, its head at zero."""
  fresh = model.init(key)
  return {
    name: policy[name] if name in policy else leaf
    for name, leaf in fresh.items()
  }


def _zero() -> jax.Array:
  return jnp.zeros((), jnp.int32)
