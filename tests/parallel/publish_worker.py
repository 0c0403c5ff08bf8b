"""One of two processes with two devices each, which publish weights.

    python -m tests.parallel.publish_worker NUMBER PORT

Prints, for each layout, the local devices and whether the copies are right.
"""

import os
import sys

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_NUM_CPU_DEVICES'] = '2'

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from stppo_jax.parallel import mesh as mesh_lib  # noqa: E402
from stppo_jax.parallel import publish  # noqa: E402
from stppo_jax.parallel import sharding  # noqa: E402


def main(number: int, port: int) -> None:
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(f'127.0.0.1:{port}', 2, number)
  rng = np.random.default_rng(0)
  kernel = rng.standard_normal((2, 64, 32)).astype(np.float32)
  params = {'layers': {'q_proj': {'kernel': kernel}}}
  for fsdp, tensor, decoding in ((4, 1, 1), (4, 1, 2), (2, 2, 2), (2, 2, 1)):
    mesh = mesh_lib.make_mesh(data=1, fsdp=fsdp, tensor=tensor)
    (layout,) = jax.tree.leaves(sharding.param_shardings(params, mesh))
    trained = jax.make_array_from_callback(
      kernel.shape, layout, lambda index: kernel[index]
    )
    placement = publish.Placement(mesh, decoding)
    publisher = publish.Publisher(placement, _copied, num_layers=2)
    published = publisher({'layers': {'q_proj': {'kernel': trained}}})
    assert placement.mesh.devices.size == jax.local_device_count()
    for layer, expected in zip(published['layers'], kernel, strict=True):
      found = layer['q_proj']['kernel']
      assert found.sharding.mesh == placement.mesh
      assert found.addressable_shards[0].data.shape == (64, 32 // decoding)
      np.testing.assert_array_equal(np.asarray(found), expected)
  mesh = mesh_lib.make_mesh(data=1, fsdp=1, tensor=4)
  try:
    publish.Placement(mesh, 4)
  except ValueError as error:
    assert 'must divide the 2 devices of this host' in str(error)
  print('published')


def _copied(params):
  return jax.tree.map(jnp.copy, params)


if __name__ == '__main__':
  main(int(sys.argv[1]), int(sys.argv[2]))
