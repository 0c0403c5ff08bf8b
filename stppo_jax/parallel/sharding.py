"""Shards parameters and batches on the mesh, by ordered rules."""

import re
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from stppo_jax.parallel import activations
from stppo_jax.parallel import mesh as mesh_lib

Tree = Any

_WIDTH = mesh_lib.WEIGHT_AXES
# The first rule whose pattern is found in 'layers/q_proj/kernel' applies.
# Leaves of the stacked layers have a leading layer axis, which is not sharded.
RULES: tuple[tuple[str, P], ...] = (
  (r'(embedding|lm_head)$', P('tensor', _WIDTH)),
  (r'moe/router/kernel$', P(None, _WIDTH)),
  # Along `expert`, devices have different experts, see `dispatch`; along the
  # other axes they have slices of these.
  (r'moe/(gate|up)_proj/kernel$', P(None, 'expert', 'fsdp', 'tensor')),
  (r'moe/down_proj/kernel$', P(None, 'expert', 'tensor', 'fsdp')),
  (r'(q|k|v|gate|up)_proj/kernel$', P(None, _WIDTH, 'tensor')),
  (r'(o|down)_proj/kernel$', P(None, 'tensor', _WIDTH)),
  # An adapter is sharded along the side that it shares with its kernel.
  (r'moe/(gate|up)_proj/lora_a$', P(None, 'expert', 'fsdp')),
  (r'moe/(gate|up)_proj/lora_b$', P(None, 'expert', None, 'tensor')),
  (r'moe/down_proj/lora_a$', P(None, 'expert', 'tensor')),
  (r'moe/down_proj/lora_b$', P(None, 'expert', None, 'fsdp')),
  (r'(q|k|v|gate|up)_proj/lora_a$', P(None, _WIDTH)),
  (r'(q|k|v|gate|up)_proj/lora_b$', P(None, None, 'tensor')),
  (r'(o|down)_proj/lora_a$', P(None, 'tensor')),
  (r'(o|down)_proj/lora_b$', P(None, None, _WIDTH)),
  (r'(q|k|v|gate|up)_proj/bias$', P(None, 'tensor')),
  (r'(norm/scale|(o|down)_proj/bias)$', P()),
  (r'scalar_head$', P(_WIDTH)),
  (r'ns_coeffs$', P()),  # constants in the state of Muon
)


def param_shardings(params: Tree, mesh: jax.sharding.Mesh) -> Tree:
  """Returns a NamedSharding per leaf, by the first rule that matches its name.

  A dimension that its axis does not divide is replicated. This concerns small
  arrays only: a model refuses a mesh that does not divide its large ones
  (`mesh.check_divides`).

  Args:
    params: arrays or shapes; also trees that contain parameter trees, such as
      optimiser states, whose scalars (counters) are replicated.
    mesh: the result of `make_mesh`.

  Raises:
    ValueError: no rule matches a name.
  """

  def one(path, leaf):
    # A pattern may match anywhere in a name, so that states of the optimiser,
    # in which the parameters' names follow those of its own fields, match too.
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    if leaf.ndim == 0:
      return NamedSharding(mesh, P())
    for pattern, spec in RULES:
      if re.search(pattern, name):
        return NamedSharding(mesh, activations.fitting(spec, leaf.shape, mesh))
    raise ValueError(f'no sharding rule matches parameter {name!r}')

  return jax.tree_util.tree_map_with_path(one, params)


def constrain_params(params: Tree, mesh: jax.sharding.Mesh | None) -> Tree:
  """Returns parameters or gradients, in a program, sharded by the rules.

  Raises:
    ValueError: no rule matches a name.
  """
  if mesh is None or mesh.size == 1:
    return params
  return jax.lax.with_sharding_constraint(params, param_shardings(params, mesh))


def gathered(layout: Tree) -> Tree:
  """Returns a layout of parameters with the whole width on each device."""
  whole = lambda axes: None if 'fsdp' in activations.names(axes) else axes
  return jax.tree.map(
    lambda x: NamedSharding(x.mesh, P(*map(whole, x.spec))), layout
  )


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns the sharding of rows over all axes that cut batches."""
  return NamedSharding(mesh, P(mesh_lib.BATCH_AXES))


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns the sharding with a full copy on each device."""
  return NamedSharding(mesh, P())


def with_layout(shapes: Tree, layouts: Tree) -> Tree:
  """Returns shapes with shardings attached."""
  return jax.tree.map(
    lambda s, layout: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=layout),
    shapes,
    layouts,
  )
