"""Rows selected from a sharded batch: which they are, and what devices hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import rows
from stppo_jax.parallel import sharding
from stppo_jax.tools.plan import hlo
from stppo_jax.tools.plan import hlo_cost

_ROWS, _LENGTH = 32, 5


def _batch():
  rng = np.random.default_rng(0)
  return {
    'numbers': rng.normal(size=(_ROWS, _LENGTH)).astype(np.float32),
    'mask': rng.random((_ROWS, _LENGTH)) < 0.5,
    'ids': rng.integers(0, 99, _ROWS).astype(np.int16),
  }


def _compiled(axes):
  mesh = mesh_lib.make_mesh(**dict(zip(('data', 'fsdp', 'tensor'), axes)))
  layout = sharding.batch_sharding(mesh)
  select = jax.jit(
    lambda batch, chosen: rows.select(batch, chosen, mesh), out_shardings=layout
  )
  batch = jax.device_put(_batch(), layout)
  chosen = jnp.arange(_ROWS // 2)
  return batch, select.lower(batch, chosen).compile()


@pytest.mark.parametrize('axes', [(2, 2, 2), (1, 8, 1)])
def test_rows_are_selected_without_gathering_the_batch(axes):
  batch, select = _compiled(axes)
  chosen = np.random.default_rng(1).permutation(_ROWS)[: _ROWS // 2]
  found = select(batch, jnp.asarray(chosen))
  for name, array in _batch().items():
    np.testing.assert_array_equal(found[name], array[chosen])
  text = select.as_text()
  assert {c.kind for c in hlo_cost.collectives(hlo.read(text))} == {
    'all-to-all'
  }
  # Of the largest array, a device holds its own rows, or one row of each
  # device, never those of the whole batch.
  held = max(x.size for x in hlo.read(text).instructions if len(x.arrays) == 1)
  assert held <= _ROWS // 4 * _LENGTH * 4


def test_one_device_takes_its_own_rows():
  mesh = mesh_lib.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
  chosen = np.array([3, 0, 3])
  found = rows.select(_batch(), chosen, mesh)
  np.testing.assert_array_equal(found['ids'], _batch()['ids'][chosen])


@pytest.mark.parametrize('index', [[[1, 0], [9, 3]], [1, 9, 7]])
def test_rows_of_each_part_are_taken_and_put(index):
  x = np.arange(8.0)[:, None]
  index = np.array(index)
  # In two parts of four rows, row 3 of the second one is row 7.
  numbers = (index + [[0], [4]]).ravel() if index.ndim == 2 else index
  numbers = np.where(index.ravel() == 9, 9, numbers)
  real = numbers < 8
  found = np.asarray(jax.jit(rows.take_clipped)(x, index))
  np.testing.assert_array_equal(found[real], x[numbers[real]])
  new = -np.arange(1.0, 1 + len(numbers))[:, None]
  put = jax.jit(lambda *arrays: rows.put(*arrays, mesh=None))
  updated = put(x, index, new)
  expected = x.copy()
  expected[numbers[real]] = new[real]
  np.testing.assert_array_equal(updated, expected)


@pytest.mark.parametrize('axes', [(2, 1, 1), (1, 1, 2)])
def test_rows_are_put_back_on_devices_without_sending_them(axes):
  data, fsdp, tensor = axes
  mesh = mesh_lib.make_mesh(
    data=data, fsdp=fsdp, tensor=tensor, devices=jax.devices()[:2]
  )
  x, index = jnp.zeros((8, 1)), jnp.array([[9], [1]])
  x = jax.device_put(x, sharding.batch_sharding(mesh))
  put = jax.jit(lambda *arrays: rows.put(*arrays, mesh=mesh))
  compiled = put.lower(x, index, jnp.ones((2, 1))).compile()
  # The first part gets nothing: 9 stands for no row.
  np.testing.assert_array_equal(
    put(x, index, jnp.ones((2, 1)))[:, 0], [0, 0, 0, 0, 0, 1, 0, 0]
  )
  assert 'all-' not in compiled.as_text()
