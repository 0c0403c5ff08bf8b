"""Splits a batch into minibatches, and their rows into microbatches.

B rows of a minibatch, n microbatches of B / n rows each.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core as extend_core
import jax.numpy as jnp
import numpy as np

from stppo_jax.parallel import sharding

Tree = Any


def minibatch_rows(
  num_rows: int, *, size: int, count: int, seed: int, step: int
) -> list[np.ndarray]:
  """Returns the row numbers of each minibatch of a step, epoch by epoch.

  Every epoch of every step has its own permutation. It is derived from the
  arguments and not stored, so a resumed run uses the same minibatches.

  Args:
    num_rows: rows of the collected batch.
    size: rows of a minibatch; divides `num_rows`.
    count: the number of minibatches, from as many epochs as necessary.
    seed: the run's seed.
    step: the training step.

  Returns:
    int32 arrays of `size` row numbers.
  """
  num_epochs = -(-count * size // num_rows)
  order = np.concatenate(
    [
      np.random.default_rng((seed, step, epoch)).permutation(num_rows)
      for epoch in range(max(1, num_epochs))
    ]
  )
  return np.split(order.astype(np.int32), len(order) // size)[:count]


def split(rows: Tree, num_microbatches: int) -> Tree:
  """Reshapes every leaf from [B, ...] to [n, B / n, ...].

  Microbatch i holds the rows i, i + n, i + 2n, ...: interleaved, because the
  devices of a mesh hold contiguous rows, and so each device splits its own.
  """
  return jax.tree.map(
    lambda x: x.reshape(-1, num_microbatches, *x.shape[1:]).swapaxes(0, 1),
    rows,
  )


def join(microbatches: Tree) -> Tree:
  """Inverts `split`: [n, B / n, ...] to [B, ...]."""
  return jax.tree.map(
    lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), microbatches
  )


def map_rows(
  function: Callable[[Tree], Tree], rows: Tree, num_microbatches: int
) -> Tree:
  """Applies a function to the rows, one microbatch after the other.

  Args:
    function: maps arrays [B / n, ...] to arrays [B / n, ...].
    rows: arrays [B, ...].
    num_microbatches: n; divides B. 1 calls the function without a loop.
  """
  if num_microbatches == 1:
    return function(rows)
  _, outputs = jax.lax.scan(
    lambda _, microbatch: (None, function(microbatch)),
    None,
    split(rows, num_microbatches),
  )
  return join(outputs)


def accumulate(
  function: Callable[[Tree], tuple[Tree, Tree]], microbatches: Tree
) -> tuple[Tree, Tree]:
  """Sums one output of a function over microbatches and stacks the other.

  Args:
    function: maps a microbatch to a pair (tree to be summed, tree to be
      stacked).
    microbatches: arrays [n, B / n, ...] from `split`; n = 1 takes no loop.

  Returns:
    The sums, and the stacked outputs with a leading axis n.
  """
  first = jax.tree.map(lambda x: x[0], microbatches)
  if len(jax.tree.leaves(microbatches)[0]) == 1:
    sums, outputs = function(first)
    return sums, jax.tree.map(lambda x: x[None], outputs)
  # Tracing a model takes seconds, so it is done once, for the shapes and the
  # loop. The carry starts from zeros of the summands' shapes, not from the
  # first microbatch's sum, so that the function is compiled once.
  traced, shapes = jax.make_jaxpr(function, return_shape=True)(first)
  call = extend_core.jaxpr_as_fun(traced)
  structure = jax.tree.structure(shapes)
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[0])

  def add(sums, microbatch):
    new, outputs = structure.unflatten(call(*jax.tree.leaves(microbatch)))
    return jax.tree.map(jnp.add, sums, new), outputs

  return jax.lax.scan(add, zeros, microbatches)


def to_accumulator(gradient: Tree, mesh: jax.sharding.Mesh | None) -> Tree:
  """Returns a gradient in float32, laid out like the parameters.

  Without the constraint the compiler may keep the sum over microbatches
  replicated, which costs every device the memory of the whole gradient. How the
  devices reduce their shares is left to the compiler: on CPU it all-reduces and
  slices, on accelerators it reduce-scatters.
  """
  gradient = jax.tree.map(lambda g: g.astype(jnp.float32), gradient)
  return sharding.constrain_params(gradient, mesh)
