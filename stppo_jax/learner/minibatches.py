"""Splits a batch into minibatches, and a minibatch into microbatches.

B rows of a minibatch, s shards of these rows, n microbatches, and b slots for
the rows that a shard has in a microbatch.
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
    num_rows: the number of rows of the collected batch.
    size: the number of rows of a minibatch; divides `num_rows`.
    count: the number of minibatches, from as many epochs as necessary.
    seed: the run's seed.
    step: the training step.
    shuffle: whether the rows are permuted in every epoch. If False, they keep
      the order of the batch.

  Returns:
    For each minibatch an int32 array of `size` row numbers.
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
    rows: arrays [B, ...] in a tree with a field `packing`.
    packing: the rows of each microbatch. Rows stay within their shards. An
      unused slot becomes a row of zeros, which has no tokens and no weight.
      With None all rows are one microbatch.
  """
  if packing is None:
    return jax.tree.map(lambda x: x[None], rows)
  taken = jax.tree.map(lambda x: _take(x, packing.rows), rows)
  if isinstance(taken, batch_lib.TokenBatch):
    return taken.replace(packing=packing)
  return taken._replace(packing=packing)


def join(microbatches: Tree, packing: batch_lib.Packing, num_rows: int) -> Tree:
  """Joins the arrays of microbatches; the inverse of `split`.

  Args:
    microbatches: arrays [n, s b, ...].
    packing: see `split`.
    num_rows: B.

  Returns:
    Arrays [B, ...].
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
    rows: arrays [B, ...], in a tree with a field `packing`.
    packing: see `split`.
  """
  _, outputs = jax.lax.scan(
    lambda _, microbatch: (None, function(microbatch)),
    None,
    split(rows, packing),
  )
  return join(outputs, packing, len(jax.tree.leaves(rows)[0]))


def _take(x: Array, rows_nsb: Array) -> Array:
  """Takes rows of each shard of an array [B, ...]; unused slots become 0.

  Returns:
    The rows [n, s b, ...].
  """
  n, s, b = rows_nsb.shape
  # Each shard is indexed separately, so that a device reads only its own rows.
  # An index into the whole array would make the compiler gather the batch on
  # every device.
  parts = x.reshape(s, -1, *x.shape[1:])
  take = lambda part, rows_nb: part.at[rows_nb].get(mode='fill', fill_value=0)
  taken = jax.vmap(take, in_axes=(0, 1), out_axes=1)(parts, rows_nsb)
  return taken.reshape(n, s * b, *x.shape[1:])


def _put(x: Array, rows_nsb: Array, num_rows: int) -> Array:
  """Returns the array [B, ...] from which `_take` took the rows."""
  n, s, b = rows_nsb.shape
  shape = x.shape[2:]
  # Every row of the batch is in one slot of one microbatch, so no row is
  # written twice. 'drop' leaves out the unused slots.
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
    microbatches: arrays [n, ...] from `split`; for n = 1 there is no loop.

  Returns:
    The sums, and the stacked outputs with a leading axis n.
  """
  first = jax.tree.map(lambda x: x[0], microbatches)
  if len(jax.tree.leaves(microbatches)[0]) == 1:
    sums, outputs = function(first)
    return sums, jax.tree.map(lambda x: x[None], outputs)
  # Tracing a model takes seconds, so the function is traced once, for both the
  # shapes and the loop. `jax.eval_shape` and `scan` would trace it twice. The
  # carry starts from zeros of the summands' shapes. If it started from the
  # first microbatch's outputs, the function would be compiled twice.
  traced, shapes = jax.make_jaxpr(function, return_shape=True)(first)
  call = extend_core.jaxpr_as_fun(traced)
  structure = jax.tree.structure(shapes)
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[0])

  def add(sums, microbatch):
    new, outputs = structure.unflatten(call(*jax.tree.leaves(microbatch)))
    return jax.tree.map(jnp.add, sums, new), outputs

  return jax.lax.scan(add, zeros, microbatches)


def to_accumulator(gradient: Tree, mesh: jax.sharding.Mesh | None) -> Tree:
  """Returns a gradient in float32, sharded like the parameters.

  Without the sharding constraint the compiler may keep the sum over
  microbatches replicated, which costs every device the memory of the whole
  gradient. The compiler decides how the devices sum their gradients: on CPU it
  all-reduces and slices, on accelerators it reduce-scatters.
  """
  # Gradients are summed in float32 even if the model computes in bfloat16. A
  # bfloat16 sum over many microbatches would stop growing.
  gradient = jax.tree.map(lambda g: g.astype(jnp.float32), gradient)
  return sharding.constrain_params(gradient, mesh)
