"""Names, shapes and dtypes of the leaves of a state, as a manifest has them."""

from typing import Any

import jax


def named(tree: Any) -> dict[str, Any]:
  """Returns the leaves by dotted path, such as 'policy.layers.norm'."""
  found = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    name = jax.tree_util.keystr(path, simple=True, separator='.') or 'state'
    if name in found:
      raise ValueError(f'two leaves of the state are named {name!r}')
    found[name] = leaf
  return found


def kind(leaf: Any) -> dict[str, Any]:
  """Returns shape and dtype of a leaf, in the form of a manifest."""
  return {'shape': list(leaf.shape), 'dtype': str(leaf.dtype)}


def difference(saved: dict[str, dict], wanted: dict[str, Any]) -> str:
  """Returns the first leaf, by name, that differs; '' if none does.

  Args:
    saved: name to kind, as a manifest has them.
    wanted: name to leaf.
  """
  for name in sorted(saved.keys() | wanted.keys()):
    expected = _describe(kind(wanted[name])) if name in wanted else 'nothing'
    found = _describe(saved[name]) if name in saved else 'nothing'
    if found != expected:
      return f'leaf {name}: expected {expected}, found {found}'
  return ''


def _describe(kind: dict[str, Any]) -> str:
  """Returns a leaf's kind as text, such as float32[16,8]."""
  return f'{kind["dtype"]}[{",".join(map(str, kind["shape"]))}]'
