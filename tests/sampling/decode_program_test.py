"""Reads in compiled programs what decoding holds, reads and sends.

A is the number of slots, J the length of a slot's cache; both are unlike every
other size, so that arrays can be told apart by their dimensions.
"""

import dataclasses
import math
import re
from typing import Any

import jax
import numpy as np
import pytest

from stppo_jax.models import cache as cache_lib
from stppo_jax.parallel import sharding
from stppo_jax.sampling import engine_options
from stppo_jax.sampling import lowering
from stppo_jax.sampling import slot_driver
from stppo_jax.tools.plan import hlo
from stppo_jax.tools.plan import program
from tests.models import tiny
from tests.sampling import tiny_engine

_A, _J = 40, 1000
_MODEL = tiny.model(
  num_heads=4, num_kv_heads=2, vocab_size=12, hidden_size=48, dtype='bfloat16'
)


def _lowering(model, devices, tensor, **changes):
  """Returns the engine of a model on some devices; no array is made."""
  placement = tiny_engine.placement(devices, tensor)
  weights = jax.eval_shape(model.init, jax.random.key(0))
  return lowering.Lowering(
    model,
    placement=placement,
    options=tiny_engine.options(
      slots=_A, max_length=_J, page_size=_J, decode_chunk=5, **changes
    ),
    num_states=3,
    trained=jax.tree.map(
      lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout),
      weights,
      sharding.param_shardings(weights, placement.training),
    ),
  )


def _per_device(tree):
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


# Keys and values are cut by heads; or by slots, with as many devices as that.
@pytest.mark.slow
@pytest.mark.parametrize(
  ('devices', 'tensor'),
  [(4, 2), pytest.param(4, 4, marks=pytest.mark.slow)],
)
def test_decoding_on_devices_neither_copies_nor_sends_the_cache(
  devices, tensor
):
  model = dataclasses.replace(
    _MODEL, config=dataclasses.replace(_MODEL.config, dtype='float32')
  )
  engine = _lowering(model, devices, tensor)
  cache, compiled = engine.state.cache, engine.decode().compile()
  memory = compiled.memory_analysis()
  size = _per_device(cache)
  assert size == 2 * 2 * _A * 2 * _J * 8 * 4 / devices  # layers, k and v, heads
  assert memory.alias_size_in_bytes >= size
  assert memory.temp_size_in_bytes < size / 2
  text = compiled.as_text()
  # What devices send for each token has no axis of the cache's length, and is
  # no larger than the hidden states of all slots.
  sent = [x.dims for c in program.collectives(hlo.read(text)) for x in c.arrays]
  assert sent and max(map(math.prod, sent)) <= _A * 48
  assert all(_J not in dims for dims in sent)
  # No array repeats keys or values for the query heads that share them.
  keys = math.prod(cache[0][0][0].sharding.shard_shape(cache[0][0][0].shape))
  of_cache = [
    math.prod(dims)
    for line in hlo.read(text).instructions
    for _, dims, _ in line.arrays
    if _J in dims and 8 in dims
  ]
  assert of_cache and max(of_cache) == keys


@pytest.mark.parametrize(
  ('devices', 'tensor'),
  [(4, 2), pytest.param(4, 4, marks=pytest.mark.slow)],
)
def test_devices_gather_their_own_active_slots(devices, tensor):
  model = dataclasses.replace(
    _MODEL, config=dataclasses.replace(_MODEL.config, dtype='float32')
  )
  some = {'deterministic': False, 'batch_rows': 5}
  engine = _lowering(model, devices, tensor, **some)
  compiled = engine.decode().compile()
  size = _per_device(engine.state.cache)
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes >= size
  slots = _A // cache_lib.row_shards(
    model.config, tiny_engine.placement(devices, tensor).mesh
  )
  # What a plan counts beside the cache, see `most_copied`.
  options = tiny_engine.options(slots=_A, **some)
  assert options.most_copied(_A // slots) == 5
  assert memory.temp_size_in_bytes >= 5 * size / slots
  text = compiled.as_text()
  sent = [x.dims for c in program.collectives(hlo.read(text)) for x in c.arrays]
  assert sent and all(_J not in dims for dims in sent)
  # Attention reads 5 slots of a device, of as many as it has heads of.
  heads = 1 if tensor == 2 else 2
  shapes = {
    tuple(dims)
    for line in hlo.read(text).instructions
    for _, dims, _ in line.arrays
    if _J in dims and 8 in dims
  }
  assert {dims[0] for dims in shapes} <= {slots, 5, 1}
  assert (5, heads, _J, 8) in shapes


def test_weights_are_read_in_the_dtype_of_the_computation():
  engine = _lowering(_MODEL, 1, 1)
  converted = re.findall(
    r'convert %\S+ : \(tensor<([\dx]+)xbf16>\) -> tensor<[\dx]+xf32>',
    engine.decode().as_text(),
  )
  shapes = {
    'x'.join(map(str, x.shape)) for x in jax.tree.leaves(engine.weights)
  }
  matrices = {shape for shape in shapes if 'x' in shape}
  assert len(matrices) > 4 and converted
  assert not matrices & set(converted)


class _Shapes:
  """Stands in for compiled programs; records how many slots they run on."""

  shards, block_size, params, table_ZV = 1, 64, None, None

  def __init__(self):
    self.sizes = set()

  def put(self, *trees):
    return trees

  def decode(self, params, state, key_data_A2, table_ZV, **kwargs):
    self.sizes.add(len(key_data_A2))
    return state, None


@pytest.mark.parametrize('slots', [512, 100, 7])
def test_batches_have_at_most_four_sizes(slots):
  shapes: Any = _Shapes()
  options: engine_options.EngineOptions = tiny_engine.options(
    slots=slots, deterministic=False
  )
  driver = slot_driver.SlotDriver(shapes, options)
  for count in range(1, slots + 1):
    chosen = {
      n: slot_driver.Decode(np.zeros(2, np.uint32), 1) for n in range(count)
    }
    driver.decode(chosen, greedy=False, enough=1)
  assert max(shapes.sizes) == slots and len(shapes.sizes) <= 4
