"""Sizes of the mesh that are given, left open, or impossible."""

import jax
import pytest

from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import topology


@pytest.mark.parametrize(
  ('sizes', 'shape'),
  [
    ((2, 2, 1, 2), (2, 2, 1, 2)),
    ((-1, 1, 1, 1), (8, 1, 1, 1)),
    ((2, -1, 1, 1), (2, 4, 1, 1)),
    ((1, 2, -1, 1), (1, 2, 4, 1)),
    ((4, 2, 1, -1), (4, 2, 1, 1)),
  ],
)
def test_one_size_may_be_the_remaining_devices(sizes, shape):
  names = ('data', 'fsdp', 'expert', 'tensor')
  mesh = mesh_lib.make_mesh(**dict(zip(names, sizes)))
  assert mesh.axis_names == names
  assert mesh.devices.shape == shape
  assert mesh.devices.ravel().tolist() == jax.devices()
  # Layouts are found by the compiler, not written into types.
  assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


@pytest.mark.parametrize(
  'sizes',
  [(3, 1, 1), (3, -1, 1), (16, -1, 1), (2, 2, 1), (-1, -1, 2), (0, -1, 1)],
)
def test_sizes_that_do_not_fit_are_refused(sizes):
  data, fsdp, tensor = sizes
  with pytest.raises(ValueError, match='does not fit 8 devices.*multiply'):
    mesh_lib.make_mesh(data=data, fsdp=fsdp, tensor=tensor)


@pytest.mark.parametrize(
  ('fraction', 'learning'),
  [(0.0, '0123 4567'), (0.25, '012 456'), (0.5, '01 45'), (0.7, '0 4')],
)
def test_the_last_devices_of_each_host_collect(fraction, learning):
  hosts = topology.virtual(topology.find('v5p:2x2x2'))  # two hosts of four
  learn, collect = mesh_lib.divide(hosts, fraction)
  expected = [hosts[int(n)] for n in learning.replace(' ', '')]
  assert learn == expected
  assert collect == ([d for d in hosts if d not in learn] if fraction else [])


@pytest.mark.parametrize('fraction', [0.01, 0.95])
def test_a_host_has_devices_of_both_kinds(fraction):
  with pytest.raises(ValueError, match=f'mesh.collect_fraction={fraction}: '):
    mesh_lib.divide(jax.devices(), fraction)


@pytest.mark.parametrize('name', ['v5e:4x4', 'v6e:2x8'])
def test_several_hosts_of_some_tpus_are_not_divided(name):
  chips = topology.virtual(topology.find(name))
  with pytest.raises(ValueError, match=f'must be 0 on 4 hosts of {name}'):
    mesh_lib.divide(chips, 0.5)
  assert mesh_lib.divide(chips, 0) == (chips, [])
  learning, collecting = mesh_lib.divide(chips[:4], 0.5)
  assert (learning, collecting) == (chips[:2], chips[2:4])
