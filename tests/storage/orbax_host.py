"""One of the processes that save arrays to a bucket with Orbax, and read them.

    python -m tests.storage.orbax_host ADDRESS COORDINATOR COUNT INDEX STEP...

It saves the steps that are not there, reads the newest one, and prints which
steps there are and which one it has read.
"""

import sys

import jax
import numpy as np
import orbax.checkpoint as ocp

_SHAPE = (8, 4)


def main(address, coordinator, count, index, *steps) -> None:
  jax.distributed.initialize(coordinator, int(count), int(index))
  mesh = jax.make_mesh((jax.device_count(),), ('data',))
  rows = jax.NamedSharding(mesh, jax.P('data'))
  everywhere = jax.NamedSharding(mesh, jax.P())

  def state(step):
    numbers = np.arange(np.prod(_SHAPE), dtype=np.float32).reshape(_SHAPE)
    place = lambda x, sharding: jax.make_array_from_callback(
      x.shape, sharding, lambda part: x[part]
    )
    return {
      'rows': place(numbers + step, rows),
      'all': place(numbers * step, everywhere),
    }

  options = ocp.CheckpointManagerOptions(max_to_keep=2)
  with ocp.CheckpointManager(address, options=options) as manager:
    there = manager.all_steps()
    for step in map(int, steps):
      if step not in there:
        manager.save(step, args=ocp.args.StandardSave(state(step)))
    manager.wait_until_finished()
    newest = manager.latest_step()
    assert newest is not None
    found = manager.restore(newest, args=ocp.args.StandardRestore(state(0)))
    is_equal = all(
      np.array_equal(np.asarray(a.data), np.asarray(b.data))
      for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(state(newest)))
      for a, b in zip(x.addressable_shards, y.addressable_shards)
    )
    print('steps', sorted(manager.all_steps()), 'read', newest, is_equal)
  jax.distributed.shutdown()


if __name__ == '__main__':
  main(*sys.argv[1:])
