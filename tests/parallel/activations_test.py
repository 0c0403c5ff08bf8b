"""Activations and their gradients have the requested sharding."""

import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from stppo_jax.parallel import activations
from stppo_jax.parallel import mesh as mesh_lib

_ROWS, _TENSOR = activations.ROWS, activations.TENSOR


def _mesh():
  return mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)


@pytest.mark.parametrize(
  ('shape', 'axes', 'expected'),
  [
    ((8, 5, 4), (_ROWS,), P(_ROWS)),
    ((8, 5, 4), (_ROWS, None, _TENSOR), P(_ROWS, None, _TENSOR)),
    # A dimension that does not divide is replicated, the others are sharded.
    ((6, 5, 4), (_ROWS, None, _TENSOR), P(None, None, _TENSOR)),
    ((8, 5, 3), (_ROWS, None, _TENSOR), P(_ROWS)),
  ],
)
def test_axes_that_divide_are_sharded(shape, axes, expected):
  mesh, x = _mesh(), np.ones(shape, np.float32)
  layout = jax.sharding.NamedSharding(mesh, expected)
  place = jax.jit(lambda x: activations.constrain(x, mesh, *axes))
  assert place(x).sharding.is_equivalent_to(layout, x.ndim)
  gradient = jax.jit(jax.grad(lambda x: place(x).sum()))(x)
  assert gradient.sharding.is_equivalent_to(layout, x.ndim)


@pytest.mark.parametrize(
  ('num_kv_heads', 'heads'),
  [(2, (0, 0, 1, 1)), (4, (0, 1, 2, 3)), (1, 4 * (0,))],
)
def test_devices_that_share_heads_get_copies(num_kv_heads, heads):
  mesh = mesh_lib.make_mesh(data=2, fsdp=1, tensor=4)
  x = np.arange(2 * 3 * num_kv_heads * 5.0).reshape(2, 3, num_kv_heads, 5)
  found = jax.jit(lambda x: activations.spread_heads(x, 8, mesh))(x)
  np.testing.assert_array_equal(found, x[:, :, list(heads)])
  assert found.sharding.shard_shape(found.shape) == (1, 3, 1, 5)
