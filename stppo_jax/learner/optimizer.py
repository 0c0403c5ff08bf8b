"""AdamW with its learning rate and weight decay as runtime numbers.

Order, always: (correction of the gradient,) global-norm clip, Adam, decay.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

Array = jax.Array
Tree = Any
Optimizer = optax.GradientTransformation


def build_optimizer(*, b1: float, b2: float, eps: float) -> Optimizer:
  """Adam's direction; `apply_update` scales it."""
  return optax.scale_by_adam(b1=b1, b2=b2, eps=eps)


def apply_update(
  optimizer: Optimizer,
  params: Tree,
  state: optax.OptState,
  gradient: Tree,
  count: Array,
  numbers: Mapping[str, Array | float],
) -> tuple[Tree, optax.OptState, dict[str, Array]]:
  """One optimiser step.

  Args:
    optimizer: from `build_optimizer`.
    params: float32 weights.
    state: of the optimiser.
    gradient: of the loss.
    count: updates done before this one; the rate warms up linearly, reaching
      `learning_rate` at update number `warmup_updates`.
    numbers: learning_rate, warmup_updates, weight_decay, max_grad_norm; may be
      traced, so that another value does not recompile.

  Returns:
    New weights, new state, and `grad_norm` (before clipping) and `lr`.
  """
  norm = optax.tree.norm(gradient)
  scale = jnp.minimum(1.0, numbers['max_grad_norm'] / (norm + 1e-6))
  gradient = jax.tree.map(lambda g: g * scale, gradient)
  direction, state = optimizer.update(gradient, state, params)
  warm = (count + 1) / jnp.maximum(numbers['warmup_updates'], 1)
  rate = numbers['learning_rate'] * jnp.minimum(1.0, warm)
  decay = numbers['weight_decay']
  params = jax.tree.map(
    lambda p, d: p - rate * (d + decay * p), params, direction
  )
  return params, state, {'grad_norm': norm, 'lr': rate}
