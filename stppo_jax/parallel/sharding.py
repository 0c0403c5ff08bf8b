"""Shards batches by rows, and parameters by ordered rules for their names."""

import re
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from stppo_jax.parallel import activations
from stppo_jax.parallel import mesh as mesh_lib

Tree = Any

_WIDTH = mesh_lib.WEIGHT_AXES
# Rules (pattern, partition spec). A leaf gets the partition spec of the first
# rule whose pattern is found in the name of the leaf. A name is for example
# 'layers/q_proj/kernel'. Leaves of the stacked layers have a leading axis of
# layers, which is not sharded.
RULES: tuple[tuple[str, P], ...] = (
  (r'(embedding|lm_head)$', P('tensor', _WIDTH)),
  (r'moe/router/kernel$', P(None, _WIDTH)),
  # Along `expert`, devices have different experts, see `dispatch`. Along the
  # other axes, they have slices of the same experts.
  (r'moe/(gate|up)_proj/kernel$', P(None, 'expert', 'fsdp', 'tensor')),
  (r'moe/down_proj/kernel$', P(None, 'expert', 'tensor', 'fsdp')),
  (r'(q|k|v|gate|up)_proj/kernel$', P(None, _WIDTH, 'tensor')),
  (r'(o|down)_proj/kernel$', P(None, 'tensor', _WIDTH)),
  # Each matrix of an adapter is sharded like its kernel along the dimension
  # that both have, and replicated along the rank.
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
  (r'ns_coeffs$', P()),  # constants in the state of the optimiser Muon
)


def param_shardings(params: Tree, mesh: jax.sharding.Mesh) -> Tree:
  """Returns a NamedSharding per leaf, by the first rule that matches its name.

  A dimension is replicated if its mesh axes do not divide its size. This
  happens to small arrays only, because a model refuses a mesh that does not
  divide the dimensions of its large arrays (`mesh.check_divides`).

  Args:
    params: a tree of parameters, or a tree that contains such trees, such as an
      optimiser state; leaves are arrays or shapes. Scalars are replicated.
    mesh: the result of `make_mesh`.

  Raises:
    ValueError: no rule matches the name of a leaf.
  """

  def one(path, leaf):
    # A pattern may match anywhere in a name, because in an optimiser state the
    # name of a parameter follows the name of the optimiser's field.
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    if leaf.ndim == 0:
      return NamedSharding(mesh, P())
    for pattern, spec in RULES:
      if re.search(pattern, name):
        return NamedSharding(mesh, activations.fitting(spec, leaf.shape, mesh))
    raise ValueError(f'no sharding rule matches parameter {name!r}')

  return jax.tree_util.tree_map_with_path(one, params)


def constrain_params(params: Tree, mesh: jax.sharding.Mesh | None) -> Tree:
  """Returns parameters or gradients, constrained to the shardings of `RULES`.

  Call this function inside a program.

  Raises:
    ValueError: no rule matches the name of a leaf.
  """
  if mesh is None or mesh.size == 1:
    return params
  return jax.lax.with_sharding_constraint(params, param_shardings(params, mesh))


def gathered(layout: Tree) -> Tree:
  """Returns shardings of parameters without the sharding over `fsdp`.

  Every device then has the whole width of these parameters. A dimension that
  is sharded over several axes including `fsdp` is replicated.

  Args:
    layout: the tree of shardings of the parameters.
  """
  whole = lambda axes: None if 'fsdp' in activations.names(axes) else axes
  return jax.tree.map(
    lambda x: NamedSharding(x.mesh, P(*map(whole, x.spec))), layout
  )


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns the sharding of a batch, with rows over all of `BATCH_AXES`."""
  return NamedSharding(mesh, P(mesh_lib.BATCH_AXES))


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns the sharding with a full copy on each device."""
  return NamedSharding(mesh, P())


def with_layout(shapes: Tree, layouts: Tree) -> Tree:
  """Returns a tree of `jax.ShapeDtypeStruct`, each with its sharding.

  Args:
    shapes: a tree of arrays or shapes.
    layouts: the shardings, as a tree of the same structure.
  """
  return jax.tree.map(
    lambda s, layout: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=layout),
    shapes,
    layouts,
  )
