"""Rows cut into microbatches, and sums over them.

M rows, cut into n microbatches of M / n rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from stppo_jax.parallel import sharding

Array = jax.Array
Tree = Any


def cut(rows: Tree, num_microbatches: int) -> Tree:
  """[M, ...] -> [n, M / n, ...] of every leaf; i has rows i, i + n, ...

  Interleaved, so that each device cuts its own rows.
  """
  return jax.tree.map(
    lambda x_M: x_M.reshape(-1, num_microbatches, *x_M.shape[1:]).swapaxes(
      0, 1
    ),
    rows,
  )


def joined(microbatches: Tree) -> Tree:
  """The inverse of `cut`."""
  return jax.tree.map(
    lambda x_nm: x_nm.swapaxes(0, 1).reshape(-1, *x_nm.shape[2:]),
    microbatches,
  )


def each(
  ask: Callable[[Tree], Tree], rows: Tree, num_microbatches: int
) -> Tree:
  """`ask(rows)`, a microbatch after the other; no loop for a single one.

  Args:
    ask: what is found has a row for each row asked about.
    rows: arrays [M, ...].
    num_microbatches: divides M.
  """
  if num_microbatches == 1:
    return ask(rows)
  _, found = jax.lax.scan(
    lambda _, part: (None, ask(part)), None, cut(rows, num_microbatches)
  )
  return joined(found)


def summed(
  measure: Callable[[Tree], tuple[Tree, Tree]], microbatches: Tree
) -> tuple[Tree, Tree]:
  """Sums over microbatches, and what is stacked; no loop for a single one.

  Args:
    measure: of one microbatch: what is summed, and what is stacked.
    microbatches: from `cut`.
  """
  first = jax.tree.map(lambda x: x[0], microbatches)
  if len(jax.tree.leaves(microbatches)[0]) == 1:
    sums, extra = measure(first)
    return sums, jax.tree.map(lambda x: x[None], extra)
  shapes, _ = jax.eval_shape(measure, first)
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

  def add(sums, part):
    new, extra = measure(part)
    return jax.tree.map(jnp.add, sums, new), extra

  return jax.lax.scan(add, zeros, microbatches)


def summand(gradient: Tree, mesh: jax.sharding.Mesh | None) -> Tree:
  """A gradient in float32, each part on the devices that hold its weight.

  Said, not left to the compiler: sums over microbatches lie like the weights.
  How devices add up what they found is left to it: the one for CPUs has each of
  them add all of it, and keep its part.
  """
  gradient = jax.tree.map(lambda g: g.astype(jnp.float32), gradient)
  return sharding.laid_out(gradient, mesh)
