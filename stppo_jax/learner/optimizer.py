"""AdamW with its learning rate and weight decay as runtime numbers.

The order is always: correction of the gradient, global-norm clip, Adam, decay.
"""

from collections.abc import Mapping
import functools
import math
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

Array = jax.Array
Tree = Any
Optimizer = optax.GradientTransformation


class Hyperparameters(NamedTuple):
  """Numbers of an optimiser step; another value does not recompile.

  Attributes:
    learning_rate: the rate after the warm-up.
    warmup_updates: updates over which the rate rises linearly from 0.
    weight_decay: share of a weight subtracted per unit of the rate, as in
      AdamW.
    max_grad_norm: the global norm that a gradient is clipped to.
    skip_grad_norm: the global norm above which the update is skipped.
  """

  learning_rate: Array | float
  warmup_updates: Array | float
  weight_decay: Array | float
  max_grad_norm: Array | float
  skip_grad_norm: Array | float


def from_config(
  section: Mapping[str, Any],
) -> tuple[Optimizer, Hyperparameters]:
  """Returns the optimiser of a config section, and its runtime numbers.

  Args:
    section: the fields of `Hyperparameters`, and Adam's b1, b2 and eps. Its
      `skip_grad_norm` is 0 if no update is to be skipped for its gradient.
  """
  adam = {name: section[name] for name in ('b1', 'b2', 'eps')}
  numbers = {name: float(section[name]) for name in Hyperparameters._fields}
  # 0 means that no update is skipped; infinity says that to the comparison.
  numbers['skip_grad_norm'] = numbers['skip_grad_norm'] or math.inf
  return _adam(**adam), Hyperparameters(**numbers)


@functools.lru_cache
def _adam(b1: float, b2: float, eps: float) -> Optimizer:
  """Returns Adam: the same object for equal options, so programs are shared."""
  return optax.scale_by_adam(b1=b1, b2=b2, eps=eps)


def apply_gradient(
  optimizer: Optimizer,
  params: Tree,
  state: optax.OptState,
  gradient: Tree,
  count: Array,
  hyperparameters: Hyperparameters,
) -> tuple[Tree, optax.OptState, dict[str, Array]]:
  """Takes one optimiser step.

  Args:
    optimizer: gives the direction, such as `optax.scale_by_adam`.
    params: float32 weights.
    state: the optimiser's state.
    gradient: float32, in the structure of the weights.
    count: int32 scalar, updates done before this one; update number
      `warmup_updates` is the first at the full learning rate.
    hyperparameters: may be traced.

  Returns:
    New weights, new state, and the metrics `grad_norm` (before clipping) and
    `lr`.
  """
  norm = optax.tree.norm(gradient)
  # The 1e-6 is that of torch's clipping, with which updates are compared.
  scale = jnp.minimum(1.0, hyperparameters.max_grad_norm / (norm + 1e-6))
  gradient = jax.tree.map(lambda g: g * scale, gradient)
  direction, state = optimizer.update(gradient, state, params)
  warmup = (count + 1) / jnp.maximum(hyperparameters.warmup_updates, 1)
  rate = hyperparameters.learning_rate * jnp.minimum(1.0, warmup)
  decay = hyperparameters.weight_decay
  params = jax.tree.map(
    lambda p, d: p - rate * (d + decay * p), params, direction
  )
  return params, state, {'grad_norm': norm, 'lr': rate}


def is_sound(
  new: Tree, grad_norm: Array, loss: Tree, hyperparameters: Hyperparameters
) -> Array:
  """Returns whether an update may be made.

  Args:
    new: what it would leave: weights and moments. They are looked at too,
      because a finite gradient times a large rate can overflow.
    grad_norm: the norm of its gradient before clipping.
    loss: the loss, or its terms. They are looked at too, because a square
      can overflow where its gradient does not.
    hyperparameters: may be traced.
  """
  is_small = grad_norm <= hyperparameters.skip_grad_norm
  return is_small & _all_finite((grad_norm, loss, new))


def _all_finite(tree: Tree) -> Array:
  """Returns whether every number of a tree is finite."""
  finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]
  # Without the barrier, XLA turns the last reduction into a chain of as many
  # conjunctions as there are leaves, and repeats it for every leaf that is
  # selected by the result: a third of the program of an update.
  return jnp.all(jax.lax.optimization_barrier(jnp.stack(finite)))
