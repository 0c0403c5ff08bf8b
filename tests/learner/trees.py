"""Comparisons of all arrays of two trees."""

import jax
import numpy as np


def assert_equal(actual, expected) -> None:
  """Asserts that two trees have the same structure and the same numbers."""
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_close(actual, expected, rtol=1e-5, atol=1e-6) -> None:
  """Asserts that two trees have the same structure and nearly equal numbers."""

  def check(path, a, e):
    name = jax.tree_util.keystr(path)
    np.testing.assert_allclose(a, e, rtol, atol, err_msg=name)

  jax.tree_util.tree_map_with_path(check, actual, expected)


def subtract(one, other):
  """Returns the differences of the arrays of two trees."""
  return jax.tree.map(np.subtract, one, other)


def norm(tree) -> float:
  """Returns the root of the sum of all squares."""
  return np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(tree)))
