"""Weights as they are computed with: cast once, not wherever they are used."""

import re
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any

# Used in float32 whatever the rest is computed in: a tie decides there.
_FULL = re.compile(r'(^|/)router/')


def cast(params: Tree, dtype: str) -> Tree:
  """The weights in `dtype`; what computes in float32 keeps it.

  A model casts weights where it uses them, so it makes the same numbers of
  these. Cast before a loop, they are read, and moved between devices, at the
  size of `dtype` in every iteration.

  Args:
    params: float32 weights, or shapes of them under `jax.eval_shape`.
    dtype: of the activations.
  """

  def cast(path, leaf):
    return leaf if _full(path) else leaf.astype(jnp.dtype(dtype))

  return jax.tree_util.tree_map_with_path(cast, params)


def replaced(params: Tree, dtype: str) -> Tree:
  """`computed`, for weights that nobody trains: the given ones are deleted.

  One after the other, so that devices never hold all of them twice.

  Args:
    params: arrays on devices; the new ones lie likewise.
    dtype: of the activations.
  """

  def replace(path, leaf):
    if _full(path) or leaf.dtype == jnp.dtype(dtype):
      return leaf
    cast = jax.device_put(leaf.astype(jnp.dtype(dtype)), leaf.sharding)
    cast.block_until_ready()
    leaf.delete()
    return cast

  return jax.tree_util.tree_map_with_path(replace, params)


def _full(path) -> bool:
  name = jax.tree_util.keystr(path, simple=True, separator='/')
  return _FULL.search(name) is not None
