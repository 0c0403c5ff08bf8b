"""Weights as they are computed with: cast once, not wherever they are used."""

import re
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any

# Used in float32 whatever the rest is computed in: a tie decides there.
_FULL = re.compile(r'(^|/)router/')


def computed(params: Tree, dtype: str) -> Tree:
  """The weights in `dtype`; what computes in float32 keeps it.

  A model casts weights where it uses them, so it makes the same numbers of
  these. Cast before a loop, they are read, and moved between devices, at the
  size of `dtype` in every iteration.

  Args:
    params: float32 weights, or shapes of them under `jax.eval_shape`.
    dtype: of the activations.
  """

  def cast(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    return leaf if _FULL.search(name) else leaf.astype(jnp.dtype(dtype))

  return jax.tree_util.tree_map_with_path(cast, params)
