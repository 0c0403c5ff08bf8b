"""Sizes of the mesh that are given, left open, or impossible."""

import jax
import pytest

from stppo_jax.parallel import mesh as mesh_lib


@pytest.mark.parametrize(
  ('sizes', 'shape'),
  [
    ((2, 2, 2), (2, 2, 2)),
    ((-1, 1, 1), (8, 1, 1)),
    ((2, -1, 1), (2, 4, 1)),
    ((1, 2, -1), (1, 2, 4)),
    ((4, 2, -1), (4, 2, 1)),
  ],
)
def test_one_size_may_be_the_remaining_devices(sizes, shape):
  data, fsdp, tensor = sizes
  mesh = mesh_lib.make_mesh(data=data, fsdp=fsdp, tensor=tensor)
  assert mesh.axis_names == ('data', 'fsdp', 'tensor')
  assert mesh.devices.shape == shape
  assert mesh.devices.ravel().tolist() == jax.devices()
  # Layouts are found by the compiler, not written into types.
  assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


@pytest.mark.parametrize(
  'sizes', [(3, 1, 1), (3, -1, 1), (16, -1, 1), (2, 2, 1), (-1, -1, 2)]
)
def test_sizes_that_do_not_fit_are_refused(sizes):
  data, fsdp, tensor = sizes
  with pytest.raises(ValueError, match='does not fit 8 devices.*multiply'):
    mesh_lib.make_mesh(data=data, fsdp=fsdp, tensor=tensor)


def test_a_mesh_of_some_devices():
  devices = jax.devices()[2:4]
  mesh = mesh_lib.make_mesh(data=-1, fsdp=1, tensor=1, devices=devices)
  assert mesh.devices.ravel().tolist() == devices
