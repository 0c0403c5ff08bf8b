"""The gradient by the kernel for TPU, run without a TPU, and JAX's own.

U rows, X matrices with K rows and N columns each.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import moe
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from stppo_jax.parallel import topology
from stppo_jax.tools.plan import hlo
from stppo_jax.tools.plan import hlo_cost

_KERNEL = functools.partial(moe.ragged_dot, interpret=True)


@functools.partial(jax.jit, static_argnums=0)
def _gradients(product, x_UK, w_XKN, dy_UN, sizes_X):
  y_UN, backward = jax.vjp(lambda x, w: product(x, w, sizes_X), x_UK, w_XKN)
  return y_UN, *backward(dy_UN)


def _results(product, dtype, sizes, K, N):
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape).astype(dtype)
  U = sum(sizes)
  arrays = normal(U, K), normal(len(sizes), K, N), normal(U, N)
  return _gradients(product, *arrays, np.array(sizes, np.int32))


@pytest.mark.parametrize(
  ('sizes', 'K', 'N'),
  [
    ((300, 0, 1, 211), 16, 8),  # two tiles of rows, one of them for three
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (
        ((40, 0, 23, 0), 6, 4),
        ((0, 0, 7), 5, 3),
        ((5, 4, 0), 520, 1100),  # tiles of columns that are not full
      )
    ),
  ],
)
def test_gradients_of_uneven_and_empty_groups(sizes, K, N):
  for found, expected in zip(
    _results(_KERNEL, jnp.float32, sizes, K, N),
    _results(jax.lax.ragged_dot, jnp.float32, sizes, K, N),
  ):
    bound = 1e-6 * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=bound)


def test_sums_of_bfloat16_are_rounded_once():
  case = (40, 0, 23, 0), 6, 4
  *_, found = _results(_KERNEL, jnp.bfloat16, *case)
  *_, expected = _results(jax.lax.ragged_dot, jnp.float32, *case)
  assert found.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.float32(found), expected, atol=0.15)


# A program for chips that are not there is kept, but cannot be read again.
@pytest.mark.filterwarnings('ignore:Error reading persistent compilation')
@pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed'
)
@pytest.mark.parametrize('name', ['v5e:2x2', 'v6e:2x2'])
@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float32])
def test_the_largest_tiles_fit_on_a_chip(name, dtype):
  U, K, N, X = 1000, 2048, 2000, 8
  devices = topology.devices(topology.find(name))[:1]
  mesh = mesh_lib.make_mesh(data=1, fsdp=1, tensor=1, devices=devices)
  of = lambda dtype, *shape: jax.ShapeDtypeStruct(
    shape, dtype, sharding=sharding.replicated(mesh)
  )

  def gradient(x_UK, w_XKN, sizes_X, dy_UN):
    _, backward = jax.vjp(lambda w: moe.ragged_dot(x_UK, w, sizes_X), w_XKN)
    return backward(dy_UN)

  arrays = of(dtype, U, K), of(dtype, X, K, N), of(jnp.int32, X)
  lowered = jax.jit(gradient).lower(*arrays, of(dtype, U, N))
  found = hlo_cost.operations(hlo.read(topology.compiled(lowered).as_text()))
  assert found == 2 * 1024 * K * N
