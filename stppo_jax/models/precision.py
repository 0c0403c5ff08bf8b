"""Casts weights to the dtype of the activations once, instead of per use."""

import re
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any

# Routers compute in float32 whatever the rest does: rounding their logits could
# change which experts a token visits.
_FLOAT32 = re.compile(r'(^|/)router/')


def cast(params: Tree, dtype: str) -> Tree:
  """Returns the weights in `dtype`; those of routers stay float32.

  A model casts weights where it uses them, so its results are the same with and
  without this cast. But with it, a loop over microbatches or tokens reads the
  weights, and moves them between devices, in the smaller dtype.

  Args:
    params: float32 weights, or their shapes under `jax.eval_shape`.
    dtype: name of the activations' dtype.
  """

  def cast_leaf(path, leaf):
    return leaf if _stays_float32(path) else leaf.astype(jnp.dtype(dtype))

  return jax.tree_util.tree_map_with_path(cast_leaf, params)


def cast_and_delete(params: Tree, dtype: str) -> Tree:
  """Returns `cast(params, dtype)` and deletes the arrays that it was given.

  It is meant for weights that are not trained. They are replaced one after the
  other, so that devices never hold all of them twice.

  Args:
    params: arrays on devices; the new ones have the same shardings.
    dtype: name of the activations' dtype.
  """

  def replace(path, leaf):
    if _stays_float32(path) or leaf.dtype == jnp.dtype(dtype):
      return leaf
    smaller = jax.device_put(leaf.astype(jnp.dtype(dtype)), leaf.sharding)
    smaller.block_until_ready()  # the old array is read until then
    leaf.delete()
    return smaller

  return jax.tree_util.tree_map_with_path(replace, params)


def _stays_float32(path) -> bool:
  name = jax.tree_util.keystr(path, simple=True, separator='/')
  return _FLOAT32.search(name) is not None
