"""Looks up tokens in the embedding, on one device or many.

Shape letters: B rows, L tokens of a row, D width, V vocabulary entries. One
device holds b rows of tokens, and d columns of W vocabulary entries.

The embedding table is the largest matrix of a model, and a microbatch reads few
of its entries. So on a mesh, no device gathers the table. Each device looks up
the tokens of all devices along `fsdp` in its own columns of the table. Then the
devices exchange the results, so that each device has all columns of its own
rows:

    [b fsdp, L, d]  -- all-to-all -->  [b, L, D]

In the backward pass, the same exchange in the opposite direction gives each
device the gradients of its own columns, which the device adds up. An exchange
sends as many bytes as the hidden states have, whatever the size of the
vocabulary. (If several devices are along the axis `expert`, read "along `fsdp`
and `expert`" for "along `fsdp`".)
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from stppo_jax.parallel import activations
from stppo_jax.parallel import mesh as mesh_lib

Array = jax.Array
_DATA, *_, _TENSOR = mesh_lib.AXES
_WIDTH = mesh_lib.WEIGHT_AXES


def look_up(
  table_VD: Array, tokens_BL: Array, mesh: jax.sharding.Mesh | None
) -> Array:
  """Returns each token's entry of the table, as [B, L, D] sharded by rows.

  The backward pass adds up the gradients of equal tokens in float32, and each
  device rounds its sum to the dtype of the table once. (JAX's own gradient of
  indexing adds the terms one by one in the dtype of the table. In bfloat16, the
  sum of a frequent token would stop growing after some hundred terms, because
  then each term is less than half a unit in the last place of the sum.)

  Args:
    table_VD: the embedding.
    tokens_BL: token ids.
    mesh: mesh that the arrays are laid out on; None: one device.
  """
  if _exchanges(table_VD, tokens_BL, mesh):
    return _exchanged(mesh, table_VD, tokens_BL)
  # The table is sharded by vocabulary entries. Each device contributes the
  # entries that it holds, and the results are summed over the axis `tensor`.
  table_VD = activations.constrain(table_VD, mesh, activations.TENSOR)
  x_BLD = _whole(table_VD, tokens_BL)
  return activations.constrain(x_BLD, mesh, activations.ROWS)


def _exchanges(table_VD, tokens_BL, mesh) -> bool:
  """Returns whether `look_up` exchanges results between devices.

  This needs columns of the table on different devices, and mesh axes that
  divide the table's entries, its columns, and the rows of tokens.
  """
  if mesh is None or activations.extent(mesh, _WIDTH) == 1:
    return False
  entries, width = table_VD.shape
  rows = len(tokens_BL)
  sizes = (entries, _TENSOR), (width, _WIDTH), (rows, activations.ROWS)
  return not any(size % activations.extent(mesh, axes) for size, axes in sizes)


@jax.custom_vjp
def _whole(table_VD: Array, tokens_BL: Array) -> Array:
  return table_VD[tokens_BL]


def _whole_forward(table_VD, tokens_BL):
  return table_VD[tokens_BL], (_shape(table_VD), tokens_BL)


def _whole_backward(residuals, gradient_BLD):
  empty, tokens_BL = residuals
  return _sums(empty, tokens_BL, gradient_BLD).astype(empty.dtype), None


_whole.defvjp(_whole_forward, _whole_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchanged(
  mesh: jax.sharding.Mesh, table_VD: Array, tokens_BL: Array
) -> Array:
  """Returns table_VD[tokens_BL] without gathering the table's columns."""

  def local(table_Wd, tokens_bL):
    # Token ids are small, so each device along `fsdp` gets the ids of all rows.
    # Hidden states are large, so they go only to the device of their row.
    places_BL = _places(_all_rows(tokens_bL), len(table_Wd))
    x_BLd = table_Wd.at[places_BL].get(mode='fill', fill_value=0)
    x_bLD = jax.lax.all_to_all(x_BLd, _WIDTH, 0, 2, tiled=True)
    # Only the device that holds a token's entry contributes numbers other than
    # 0.
    return jax.lax.psum(x_bLD, _TENSOR)

  return _spread(local, mesh, (_TABLE, _ROWS), _ROWS)(table_VD, tokens_BL)


def _exchanged_forward(mesh, table_VD, tokens_BL):
  residuals = _shape(table_VD), tokens_BL
  return _exchanged(mesh, table_VD, tokens_BL), residuals


def _exchanged_backward(mesh, residuals, gradient_BLD):
  empty, tokens_BL = residuals
  (entries, width), dtype = empty.shape[1:], empty.dtype
  shard = (
    entries // mesh.shape[_TENSOR],
    width // activations.extent(mesh, _WIDTH),
  )

  def local(tokens_bL, gradient_bLD):
    gradient_BLd = jax.lax.all_to_all(gradient_bLD, _WIDTH, 2, 0, tiled=True)
    places_BL = _places(_all_rows(tokens_bL), shard[0])
    sums_Wd = _sums(jnp.zeros((0, *shard), dtype), places_BL, gradient_BLd)
    return jax.lax.psum(sums_Wd.astype(dtype), _DATA)

  gradient_VD = _spread(local, mesh, (_ROWS, _ROWS), _TABLE)(
    tokens_BL, gradient_BLD
  )
  return gradient_VD, None


_exchanged.defvjp(_exchanged_forward, _exchanged_backward)

_ROWS, _TABLE = P(activations.ROWS), P(_TENSOR, _WIDTH)


def _spread(local, mesh, in_specs, out_specs):
  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=in_specs,
    out_specs=out_specs,
    check_vma=False,
  )


def _all_rows(tokens_bL: Array) -> Array:
  """Returns the token ids of the rows that all devices along `fsdp` hold."""
  return jax.lax.all_gather(tokens_bL, _WIDTH, axis=0, tiled=True)


def _places(tokens_BL: Array, count: int) -> Array:
  """Returns each token's index among the `count` entries on this device.

  If another device has the entry of a token, the index is `count`.
  """
  places_BL = tokens_BL - jax.lax.axis_index(_TENSOR) * count
  return jnp.where((places_BL >= 0) & (places_BL < count), places_BL, count)


def _shape(table_VD: Array) -> Array:
  """Returns an empty array [0, V, D] with the table's dtype.

  The backward pass needs only the shape and the dtype of the table, so the
  table itself can be freed.
  """
  return jnp.zeros((0, *table_VD.shape), table_VD.dtype)


def _sums(empty: Array, tokens_BL: Array, gradient_BLD: Array) -> Array:
  """Returns for each entry the sum of its tokens' gradients [V, D], float32.

  `empty` is an array [0, V, D]. Token ids of V or more are ignored.
  """
  sums_VD = jnp.zeros(empty.shape[1:], jnp.float32)
  return sums_VD.at[tokens_BL].add(
    gradient_BLD.astype(jnp.float32), mode='drop'
  )
