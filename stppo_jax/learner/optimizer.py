"""Optimisers whose learning rate and weight decay are inputs of a program.

A step always has this order: a correction of the gradient if the algorithm has
one, the clip of the gradient's global norm, the direction that the optimiser
forms from the gradient, and the weight decay. AdamW holds two moments of each
weight, which take twice the memory of the weights. Other optimisers in
`OPTIMIZERS` hold less.
"""

from collections.abc import Callable, Mapping
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

Array = jax.Array
Tree = Any
Optimizer = optax.GradientTransformation


class Hyperparameters(NamedTuple):
  """Numbers of an optimiser step; changing a number does not recompile.

  Attributes:
    learning_rate: the learning rate after the warm-up.
    warmup_updates: the number of updates over which the learning rate rises
      linearly from 0.
    weight_decay: the decay of AdamW; a step subtracts from each weight the
      product of learning rate, weight decay and the weight.
    max_grad_norm: the global norm to which a gradient is clipped.
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
  """Returns the optimiser of a config section, and its hyperparameters.

  Args:
    section: the fields of `Hyperparameters`, a key of `OPTIMIZERS` as `name`,
      and Adam's b1, b2 and eps. If `skip_grad_norm` is 0, no norm of a gradient
      skips an update.
  """
  adam = {name: section[name] for name in ('b1', 'b2', 'eps')}
  numbers = {name: float(section[name]) for name in Hyperparameters._fields}
  # 0 becomes infinity. No norm is larger, so no norm skips an update.
  numbers['skip_grad_norm'] = numbers['skip_grad_norm'] or math.inf
  return _build(section['name'], **adam), Hyperparameters(**numbers)


@functools.lru_cache
def _build(name: str, **adam: float) -> Optimizer:
  """Returns an optimiser; equal options give the same object.

  Learners that have the same optimiser object share their compiled programs.
  """
  return OPTIMIZERS[name](**adam)


def _in_bfloat16(*, b1: float, b2: float, eps: float) -> Optimizer:
  """Returns Adam with moments that are stored in bfloat16.

  The moments are rounded stochastically. If they were rounded to the nearest
  number, the mean of squares would stop changing: with b2=0.999 an update
  changes it by a thousandth, and neighbouring bfloat16 numbers differ by 4 to 8
  thousandths.
  """
  exact: Any = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)

  def stored(state, dtype):
    return state._replace(
      mu=optax.tree.cast(state.mu, dtype), nu=optax.tree.cast(state.nu, dtype)
    )

  def update(updates, state: Any, params: Any = None):
    direction, new = exact.update(updates, stored(state, jnp.float32), params)
    # The key depends on the count of updates. The count is in the state, so a
    # resumed run rounds as if it had never stopped.
    key = jax.random.fold_in(jax.random.key(0), state.count)
    leaves, structure = jax.tree.flatten((new.mu, new.nu))
    mu, nu = structure.unflatten(
      round_stochastically(x, jax.random.fold_in(key, n))
      for n, x in enumerate(leaves)
    )
    return direction, new._replace(mu=mu, nu=nu)

  return Optimizer(
    lambda params: stored(exact.init(params), jnp.bfloat16), update
  )


def round_stochastically(x: Array, key: Array) -> Array:
  """Rounds float32 numbers up or down at random to bfloat16 numbers.

  The expectation of a rounded number is the number itself.

  The bits of bfloat16 are the upper half of the bits of float32. A random
  number is added to the lower half, which is then cut off. The larger the lower
  half, the likelier the sum carries into the upper half, which rounds up.
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  noise = jax.random.bits(key, x.shape, jnp.uint16)
  upper = ((bits + noise) >> 16).astype(jnp.uint16)
  return jax.lax.bitcast_convert_type(upper, jnp.bfloat16)


def _adafactor(**adam: float) -> Optimizer:
  """Returns Adafactor (arXiv 1804.04235) without the scaling by the weights.

  The paper multiplies a step by the root mean square of the weights; this
  optimiser does not. In place of a mean square for each weight of a matrix, it
  holds the mean squares of the gradient's rows and columns.
  """
  del adam  # Adafactor uses the constants of its paper
  return optax.chain(
    optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)
  )


def _muon(*, b1: float, b2: float, eps: float) -> Optimizer:
  """Returns Muon for the matrices of layers, and NAdam for all other weights.

  Muon's directions are scaled to a root mean square near 0.2, which Adam's
  directions have in pretraining (arXiv 2502.16982).
  """
  muon: Any = optax.contrib.scale_by_muon(
    eps=eps, weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(-2, -1)
  )

  def update(updates, state, params=None):
    del params

    def of_layer(layer):
      gradient, mean = layer
      direction, new = muon.update(gradient, state._replace(mu=mean))
      return 0.2 * max(gradient.shape[-2:]) ** 0.5 * direction, new.mu

    # The layers are computed one after the other. To compute a layer, a device
    # gathers the layer's whole matrix. The matrices of all layers at the same
    # time would need too much memory.
    both = jax.tree.map(
      lambda *stack: jax.lax.map(of_layer, stack), updates, state.mu
    )
    direction, means = jax.tree.transpose(
      jax.tree.structure(updates), jax.tree.structure((0, 0)), both
    )
    return direction, state._replace(count=state.count + 1, mu=means)

  return optax.partition(
    {
      'muon': Optimizer(muon.init, update),
      'adam': optax.scale_by_adam(b1=b1, b2=b2, eps=eps, nesterov=True),
    },
    # Only the stacked matrices of layers have three axes or more. Embedding and
    # heads are not stacked, and biases and scales are not matrices.
    functools.partial(jax.tree.map, lambda x: 'muon' if x.ndim > 2 else 'adam'),
  )


OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
  'adamw': optax.scale_by_adam,
  'adamw_bfloat16': _in_bfloat16,
  'adafactor': _adafactor,
  'muon': _muon,
}


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
    optimizer: the transformation that gives the direction, such as
      `optax.scale_by_adam`.
    params: float32 weights.
    state: the optimiser's state.
    gradient: float32, with the tree structure of the weights.
    count: int32 scalar, the number of updates before this one. The update with
      count = warmup_updates - 1 is the first with the full learning rate.
    hyperparameters: the numbers of the step; they may be traced.

  Returns:
    New weights, new state, and the metrics `grad_norm` (before clipping) and
    `lr`.
  """
  norm = optax.tree.norm(gradient)
  # 1e-6 is added as in torch's clipping, because `benchmarks/torch_update.py`
  # compares updates with torch.
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
    new: the weights and moments after the update. They must be checked, because
      a finite gradient times a large learning rate can overflow.
    grad_norm: the norm of the update's gradient before clipping.
    loss: the loss, or its terms. They must be checked, because a square can
      overflow while its gradient is finite.
    hyperparameters: the numbers of the step; they may be traced.
  """
  is_small = grad_norm <= hyperparameters.skip_grad_norm
  return is_small & _all_finite((grad_norm, loss, new))


def _all_finite(tree: Tree) -> Array:
  """Returns whether every number of a tree is finite."""
  finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]
  # Without the barrier, XLA turns the last reduction into a chain with one
  # conjunction per leaf. Each leaf of the new state is selected by the result,
  # and XLA repeats the chain for each of them. These chains would make up a
  # third of an update's program.
  return jnp.all(jax.lax.optimization_barrier(jnp.stack(finite)))
