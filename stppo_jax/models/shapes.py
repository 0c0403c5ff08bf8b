"""A check that a parameter tree has the shapes of a model."""

from collections.abc import Mapping
from typing import Any

import jax


def check(params: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
  """Raises ValueError, naming every leaf that does not fit the model."""
  found, wanted = _shapes(params), _shapes(expected)
  wrong = [
    f'{name} {found.get(name, "missing")}, '
    f'expected {wanted.get(name, "no such parameter")}'
    for name in sorted(found.keys() | wanted.keys())
    if found.get(name) != wanted.get(name)
  ]
  if wrong:
    raise ValueError('parameters do not fit the model: ' + '; '.join(wrong))


def _shapes(params: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
  """Returns the shape of every leaf by its path."""
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf.shape
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }
