"""Splits a batch into minibatches, and their rows into microbatches.

B rows of a minibatch, n microbatches of at most b rows of each of s shards.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core as extend_core
import jax.numpy as jnp
import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax.parallel import sharding

Array = jax.Array
Tree = Any


def minibatch_rows(
  num_rows: int,
  *,
  size: int,
  count: int,
  seed: int,
  step: int,
  shuffle: bool,
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
    shuffle: whether every epoch has an order of its own, or that of the batch.

  Returns:
    int32 arrays of `size` row numbers.
  """
  num_epochs = -(-count * size // num_rows)
  rows = np.concatenate(
    [
      np.random.default_rng((seed, step, epoch)).permutation(num_rows)
      if shuffle
      else np.arange(num_rows)
      for epoch in range(max(1, num_epochs))
    ]
  )
  return np.split(rows.astype(np.int32), len(rows) // size)[:count]


def split(rows: Tree, packing: batch_lib.Packing | None) -> Tree:
  """Returns the microbatches of a minibatch, with a leading axis n.

  Args:
    rows: arrays [B, ...] in a tree with a field for the packing.
    packing: says which rows each microbatch has. They stay within their shards.
      Places without a row get zeros: rows without tokens, which weigh nothing.
      None: all rows are one microbatch.
  """
  if packing is None:
    return jax.tree.map(lambda x: x[None], rows)
  taken = jax.tree.map(lambda x: _take(x, packing.rows), rows)
  if isinstance(taken, batch_lib.TokenBatch):
    return taken.replace(packing=packing)
  return taken._replace(packing=packing)


def join(microbatches: Tree, packing: batch_lib.Packing, num_rows: int) -> Tree:
  """Joins arrays of microbatches to arrays [B, ...]; the inverse of `split`.

  Args:
    microbatches: arrays [n, s b, ...].
    packing: see `split`.
    num_rows: B.
  """
  return jax.tree.map(lambda x: _put(x, packing.rows, num_rows), microbatches)


def map_rows(
  function: Callable[[Tree], Tree],
  rows: Tree,
  packing: batch_lib.Packing,
) -> Tree:
  """Applies a function to the rows, one microbatch after the other.

  Args:
    function: maps the arrays of a microbatch to arrays with as many rows.
    rows: arrays [B, ...], in a tree with a field for the packing.
    packing: see `split`.
  """
  _, outputs = jax.lax.scan(
    lambda _, microbatch: (None, function(microbatch)),
    None,
    split(rows, packing),
  )
  return join(outputs, packing, len(jax.tree.leaves(rows)[0]))


def _take(x: Array, rows_nsb: Array) -> Array:
  """Returns rows [n, s b, ...] of the shards of an array; 0 for no row."""
  n, s, b = rows_nsb.shape
  # By shard, so that a device reads its own rows only: an index into the whole
  # array would make the compiler gather the batch on every device.
  parts = x.reshape(s, -1, *x.shape[1:])
  take = lambda part, rows_nb: part.at[rows_nb].get(mode='fill', fill_value=0)
  taken = jax.vmap(take, in_axes=(0, 1), out_axes=1)(parts, rows_nsb)
  return taken.reshape(n, s * b, *x.shape[1:])


def _put(x: Array, rows_nsb: Array, num_rows: int) -> Array:
  """Inverts `_take`."""
  n, s, b = rows_nsb.shape
  shape = x.shape[2:]
  # Every row of the batch is in one place of one microbatch, so nothing is
  # written twice; 'drop' leaves out the places without a row.
  put = lambda part, rows_nb: (
    jnp.zeros((num_rows // s, *shape), x.dtype)
    .at[rows_nb]
    .set(part, mode='drop')
  )
  parts = x.reshape(n, s, b, *shape)
  put_all = jax.vmap(put, in_axes=(1, 1))(parts, rows_nsb)
  return put_all.reshape(num_rows, *shape)


def accumulate(
  function: Callable[[Tree], tuple[Tree, Tree]], microbatches: Tree
) -> tuple[Tree, Tree]:
  """Sums one output of a function over microbatches and stacks the other.

  Args:
    function: maps a microbatch to a pair (tree to be summed, tree to be
      stacked).
    microbatches: arrays [n, ...] from `split`; n = 1 takes no loop.

  Returns:
    The sums, and the stacked outputs with a leading axis n.
  """
  first = jax.tree.map(lambda x: x[0], microbatches)
  if len(jax.tree.leaves(microbatches)[0]) == 1:
    sums, outputs = function(first)
    return sums, jax.tree.map(lambda x: x[None], outputs)
  # Tracing a model takes seconds, so it is done once, for the shapes and the
  # loop: `jax.eval_shape` and `scan` would do it twice. The carry starts from
  # zeros of the summands' shapes, not from the first microbatch's sum, so that
  # the function is compiled once.
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
  # Summed in float32 even if the model computes in bfloat16, whose sum over
  # many microbatches would stop growing.
  gradient = jax.tree.map(lambda g: g.astype(jnp.float32), gradient)
  return sharding.constrain_params(gradient, mesh)
