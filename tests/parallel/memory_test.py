"""Arrays move to the host and back with the same sharding."""

import jax
from jax.sharding import PartitionSpec as P
import numpy as np

from stppo_jax.parallel import memory
from stppo_jax.parallel import mesh as mesh_lib


def _kinds(tree):
  return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def test_arrays_go_to_the_host_and_back():
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
  memory.check_host(mesh)
  layouts = {
    'a': jax.sharding.NamedSharding(mesh, P('fsdp', 'tensor')),
    'b': jax.sharding.NamedSharding(mesh, P()),
  }
  tree = jax.device_put(
    {'a': np.arange(16.0).reshape(4, 4), 'b': np.arange(3)}, layouts
  )
  there = memory.on_host(tree)
  assert _kinds(there) == {'pinned_host'}
  assert {n: x.sharding.spec for n, x in there.items()} == {
    n: layout.spec for n, layout in layouts.items()
  }
  back = memory.on_devices(there)
  assert {n: x.sharding for n, x in back.items()} == layouts
  assert _kinds(there) == {'pinned_host'}
  jax.tree.map(np.testing.assert_array_equal, back, tree)
