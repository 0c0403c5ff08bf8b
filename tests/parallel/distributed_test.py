"""Global arrays made of the rows of this host."""

import numpy as np

from stppo_jax.parallel import distributed
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding


def test_rows_are_sharded_as_given():
  mesh = mesh_lib.make_mesh(data=4, fsdp=2, tensor=1)
  tree = {
    'tokens_BL': np.arange(16 * 3, dtype=np.int32).reshape(16, 3),
    'lengths_B': np.arange(16, dtype=np.int32),
  }
  arrays = distributed.from_local_rows(tree, sharding.batch_sharding(mesh))
  assert arrays.keys() == tree.keys()
  for name, array in arrays.items():
    assert array.shape == tree[name].shape
    assert array.dtype == tree[name].dtype
    devices = []
    for shard in array.addressable_shards:
      devices.append(shard.device)
      rows = shard.index[0]
      assert rows.stop - rows.start == 2
      np.testing.assert_array_equal(shard.data, tree[name][rows])
    assert len(set(devices)) == 8
