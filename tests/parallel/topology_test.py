"""TPU slices that are not there: their names, and programs compiled for them.

What needs the compiler for TPU is skipped without it; `pip install libtpu`
installs it on any Linux machine.
"""

import importlib.util
import os
import types
from unittest import mock

import jax
from jax.experimental import topologies
import jax.numpy as jnp
import pytest

from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from stppo_jax.parallel import topology
from tests.parallel import tpu_compiler

_THERE = importlib.util.find_spec('libtpu') is not None
needs_libtpu = pytest.mark.skipif(not _THERE, reason='libtpu is not installed')


_NO_NAMES = '|v5e|v5e:16|v9:2x2|v5e:2x2x2x2|v5e:0x4|gpu:h1:8|gpu:h100:0|cpu:0'


@pytest.mark.parametrize('name', _NO_NAMES.split('|'))
def test_a_name_that_is_no_topology_lists_the_choices(name):
  with pytest.raises(ValueError, match='v4, v5e, .*a100, h100.*or cpu') as e:
    topology.find(name)
  assert str(e.value).startswith(f'{name}: no such topology; must be')


@pytest.mark.parametrize(
  ('name', 'platform', 'devices', 'hosts', 'chips'),
  [
    ('v5e:4x4', 'tpu', 16, 4, 16),
    ('v5e:1x1', 'tpu', 1, 1, 1),
    ('v5p:2x2x4', 'tpu', 16, 4, 16),
    ('v5e:2x4', 'tpu', 8, 1, 8),
    ('v6e:4x4', 'tpu', 16, 4, 16),
    ('tpu7x:2x2x2', 'tpu', 16, 2, 8),  # two devices a chip
    ('gpu:h100:16', 'gpu', 16, 2, 16),
    ('gpu:a100:4', 'gpu', 4, 1, 4),
    ('cpu:8', 'cpu', 8, 1, 8),
  ],
)
def test_virtual_devices_of_a_topology_have_a_place_in_a_mesh(
  name, platform, devices, hosts, chips
):
  found = topology.find(name)
  assert found.num_chips == chips
  virtual = topology.virtual(found)
  mesh = mesh_lib.make_mesh(data=1, fsdp=-1, tensor=1, devices=virtual)
  assert mesh.size == found.num_devices == devices
  assert mesh_lib.platform(mesh) == platform
  assert mesh_lib.num_hosts(mesh) == hosts


def test_the_variables_of_a_tpu_machine_describe_no_other_slice(monkeypatch):
  here = {'TPU_PROCESS_BOUNDS': '1,1,1', 'TPU_WORKER_HOSTNAMES': 'a,b'}
  for name, value in (here | {'TPU_LIBRARY_PATH': '/lib'}).items():
    monkeypatch.setenv(name, value)

  def describe(*_, **__):
    assert 'TPU_PROCESS_BOUNDS' not in os.environ
    assert os.environ['TPU_WORKER_HOSTNAMES'] == 'localhost'
    assert os.environ['TPU_LIBRARY_PATH'] == '/lib'
    return types.SimpleNamespace(devices=[])

  monkeypatch.setattr(topologies, 'get_topology_desc', describe)
  assert topology.devices(topology.find('v5e:4x4')) == []


def test_gpus_fill_whole_hosts():
  with pytest.raises(ValueError, match='^gpu:h100:12: .* multiple of the 8 '):
    topology.virtual(topology.find('gpu:h100:12'))


@pytest.mark.skipif(_THERE, reason='libtpu is installed')
def test_without_the_compiler_the_error_says_what_to_install():
  with pytest.raises(ValueError, match='^v5e:2x2: needs the package libtpu'):
    topology.devices(topology.find('v5e:2x2'))


@needs_libtpu
@pytest.mark.parametrize('name', ['v5e:4x4', 'v6e:4x4'])
def test_several_hosts_whose_chips_cannot_be_divided(name):
  chips = topology.devices(topology.find(name))
  with pytest.raises(ValueError, match='must be 0 on 4 hosts of TPU v. lite,'):
    mesh_lib.divide(chips, 0.5)


@tpu_compiler.marked
@pytest.mark.parametrize('name', ['v5e:2x4', 'v5p:2x2x2'])
def test_chips_that_learn_beside_others_have_collectives(name):
  chips = topology.devices(topology.find(name))
  learning, _ = mesh_lib.divide(chips, 0.5)
  mesh = mesh_lib.make_mesh(data=1, fsdp=-1, tensor=1, devices=learning)
  x = jax.ShapeDtypeStruct(
    (1024, 1024), jnp.bfloat16, sharding=sharding.batch_sharding(mesh)
  )
  lowered = jax.jit(lambda x: jnp.tanh(x @ x.T)).lower(x)
  assert 'all-gather' in topology.compiled(lowered).as_text()


def test_a_program_that_the_compiler_rejects_is_one_line():
  error = jax.errors.JaxRuntimeError('INTERNAL: no such layout\nat line 3')
  lowered = mock.Mock(**{'compile.side_effect': error})
  with pytest.raises(topology.Rejected) as rejected:
    topology.compiled(lowered)
  line = 'the compiler rejects it: INTERNAL: no such layout'
  assert str(rejected.value) == line


@tpu_compiler.marked
@pytest.mark.parametrize(
  ('name', 'memory'),
  [('v5e:2x4', 15.75), ('v4:2x2x1', 30.75), ('tpu7x:2x2x1', 94.75)],
)
def test_slices_have_as_many_devices_and_as_much_memory_as_they_say(
  name, memory
):
  found = topology.find(name)
  devices = topology.devices(found)
  assert len(devices) == found.num_devices
  assert found.limits.memory == memory
  mesh = mesh_lib.make_mesh(data=-1, fsdp=1, tensor=1, devices=devices)
  assert mesh_lib.platform(mesh) == 'tpu' and mesh_lib.num_hosts(mesh) == 1

  def compiled(size):
    layout = sharding.replicated(mesh)
    x = jax.ShapeDtypeStruct((size, size), jnp.bfloat16, sharding=layout)
    return topology.compiled(jax.jit(lambda x: x @ x).lower(x))

  assert compiled(512).memory_analysis().argument_size_in_bytes == 2 * 512**2
  line = rf'^needs .*GiB of {memory}GiB on a chip'
  with pytest.raises(topology.DoesNotFit, match=line):
    compiled(400_000)
