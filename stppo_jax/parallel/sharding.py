"""Ordered rules from parameter names to layouts on the mesh."""

from collections.abc import Sequence
import re
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from stppo_jax.parallel import mesh as mesh_lib

Tree = Any

# The first rule whose pattern is found in 'layers/q_proj/kernel' applies.
# Stacked layers carry a leading layer axis, which is never cut.
RULES: tuple[tuple[str, P], ...] = (
  (r'(embedding|lm_head)$', P('tensor', 'fsdp')),
  # Every device has a slice of every expert: tokens do not travel.
  (r'moe/router/kernel$', P(None, 'fsdp')),
  (r'moe/(gate|up)_proj/kernel$', P(None, None, 'fsdp', 'tensor')),
  (r'moe/down_proj/kernel$', P(None, None, 'tensor', 'fsdp')),
  (r'(q|k|v|gate|up)_proj/kernel$', P(None, 'fsdp', 'tensor')),
  (r'(o|down)_proj/kernel$', P(None, 'tensor', 'fsdp')),
  # Of an adapter, the side that meets the kernel's is cut likewise.
  (r'(q|k|v|gate|up)_proj/lora_a$', P(None, 'fsdp')),
  (r'(q|k|v|gate|up)_proj/lora_b$', P(None, None, 'tensor')),
  (r'(o|down)_proj/lora_a$', P(None, 'tensor')),
  (r'(o|down)_proj/lora_b$', P(None, None, 'fsdp')),
  (r'(q|k|v)_proj/bias$', P(None, 'tensor')),
  (r'norm/scale$', P()),
  (r'scalar_head$', P('fsdp')),
)


def param_shardings(
  params: Tree,
  mesh: jax.sharding.Mesh,
  rules: Sequence[tuple[str, P]] = RULES,
) -> Tree:
  """A NamedSharding per leaf, by the first matching rule.

  An axis that does not divide a dimension leaves it whole. What is large is
  divided: a model refuses a mesh that does not (`division`).

  Args:
    params: arrays or shapes; also trees that contain parameter trees, such as
      optimiser states, whose scalars (counters) are replicated.
    mesh: from `make_mesh`.
    rules: ordered (pattern, layout) pairs.

  Raises:
    ValueError: a name that no rule matches.
  """

  def one(path, leaf):
    name = _name(path)
    if leaf.ndim == 0:
      return NamedSharding(mesh, P())
    for pattern, spec in rules:
      if re.search(pattern, name):
        return NamedSharding(mesh, _fitting(spec, leaf.shape, mesh))
    raise ValueError(f'no sharding rule matches parameter {name!r}')

  return jax.tree_util.tree_map_with_path(one, params)


def laid_out(
  params: Tree,
  mesh: jax.sharding.Mesh | None,
  rules: Sequence[tuple[str, P]] = RULES,
) -> Tree:
  """Parameters or their gradients, inside a program, where the rules say.

  Raises:
    ValueError: a name that no rule matches.
  """
  if mesh is None or mesh.size == 1:
    return params
  return jax.lax.with_sharding_constraint(
    params, param_shardings(params, mesh, rules)
  )


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Rows over `data` and `fsdp`; everything else whole."""
  return NamedSharding(mesh, P(mesh_lib.BATCH_AXES))


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
  """One full copy per device."""
  return NamedSharding(mesh, P())


def _fitting(spec: P, shape: tuple[int, ...], mesh: jax.sharding.Mesh) -> P:
  axes = [
    axis if axis is not None and size % mesh.shape[axis] == 0 else None
    for axis, size in zip(spec, shape)
  ]
  return P(*axes)


def _name(path) -> str:
  return '/'.join(
    str(getattr(key, 'key', getattr(key, 'name', getattr(key, 'idx', key))))
    for key in path
  )
