"""One of two hosts with two devices each, which decode alone and together.

    python -m tests.sampling.slice_host ADDRESS INDEX

The first host has more dialogues, the second one more collections. Prints
'same' if both engines write the same.
"""

import functools
import os
import sys

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_NUM_CPU_DEVICES'] = '2'

import jax  # noqa: E402
import numpy as np  # noqa: E402

from stppo_jax import interruption  # noqa: E402
from stppo_jax.parallel import distributed  # noqa: E402
from stppo_jax.parallel import hosts as hosts_lib  # noqa: E402
from stppo_jax.parallel import mesh as mesh_lib  # noqa: E402
from stppo_jax.parallel import publish  # noqa: E402
from stppo_jax.parallel import sharding  # noqa: E402
from stppo_jax.parallel import voting  # noqa: E402

_GROUP = 2
# Devices that cut the weights, and options of the engine.
_CASES = (
  (1, {'deterministic': True}),
  (2, {'deterministic': False, 'early_exit': 0.25}),
  (1, {'deterministic': False, 'slots': 8, 'pages': 8, 'batch_rows': 2}),
)


def main(address: str, index: str) -> None:
  with interruption.Interruption() as interrupt:
    with distributed.joined(distributed.place(address, 2, int(index))) as hosts:
      for tensor, options in _CASES:
        _compare(hosts, interrupt, tensor, options)
      print('same')


def _compare(hosts: hosts_lib.Hosts, interrupt, tensor, options) -> None:
  # Not before the hosts have met: it makes arrays.
  from stppo_jax.sampling import engine as engine_lib
  from stppo_jax.sampling import slice_driver
  from stppo_jax.sampling import slot_driver
  from tests.models import tiny
  from tests.sampling import tiny_engine

  model = tiny.model(vocab_size=12)  # an even number, for `tensor`
  weights = tiny.params(model)
  mesh = mesh_lib.make_mesh(data=-1, fsdp=1, tensor=1)
  params = jax.tree.map(
    lambda x, layout: jax.make_array_from_callback(
      x.shape, layout, lambda index: x[index]
    ),
    weights,
    sharding.param_shardings(weights, mesh),
  )

  def engine(spans_slice):
    placement = publish.Placement(mesh, tensor, spans_slice=spans_slice)
    assert placement.mesh.size == (4 if spans_slice else 2)
    driver = slot_driver.SlotDriver
    if spans_slice:
      agreed = functools.partial(voting.agreed, hosts, interrupt)
      driver = functools.partial(slice_driver.SliceDriver, agreed=agreed)
    made = engine_lib.Engine(
      model,
      placement=placement,
      automaton=tiny_engine.automaton(),
      options=tiny_engine.options(**options),
      make_driver=driver,
    )
    made.publish(params, 0)
    return made

  groups = (7, 3)[hosts.index]
  run = functools.partial(
    tiny_engine.run_dialogues,
    prompts=tiny_engine.prompts(10)[-groups:],
    row_keys=tiny_engine.keys(groups * _GROUP, seed=hosts.index),
    group_size=_GROUP,
  )
  expected, together = run(engine(False)), engine(True)
  bits = []
  for delays in (None, 1 + hosts.index):
    dialogues = [run(together, delays=delays) for _ in range(1 + hosts.index)]
    together.finish()
    for found in dialogues:
      tiny_engine.assert_all_same(found, expected)
    bits += [[x.logprobs for x in found.values()] for found in dialogues]
  if options['deterministic']:
    for other in bits[1:]:
      for x, y in zip(bits[0], other, strict=True):
        np.testing.assert_array_equal(x, y)


if __name__ == '__main__':
  main(*sys.argv[1:])
