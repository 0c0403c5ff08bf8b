"""Reads in compiled programs what decoding holds, reads and sends.

A is the number of slots, J the length of a slot's cache; both are unlike every
other size, so that arrays can be told apart by their dimensions.
"""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import precision
from stppo_jax.parallel import program
from stppo_jax.sampling import compiled_programs
from stppo_jax.sampling import engine_options
from stppo_jax.sampling import sampler
from stppo_jax.sampling import slot_driver
from stppo_jax.sampling import slot_state
from tests.models import tiny
from tests.sampling import tiny_engine

_A, _J = 40, 1000
_MODEL = tiny.model(
  num_heads=4, num_kv_heads=2, vocab_size=12, hidden_size=48, dtype='bfloat16'
)


def _lowered(model, devices, tensor):
  """Returns the lowered program of decode, and the shapes of cache and weights.

  All arguments are shapes with layouts: no array is made.
  """
  placement = tiny_engine.placement(devices, tensor)
  mesh = placement.mesh
  programs = compiled_programs.build(
    model,
    placement,
    blocks=(_J,),
    stopped=2,
    sampling=sampler.Sampling(temperature=1.0),
    num_tokens=5,
  )
  placed = lambda x, layout: jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=layout
  )
  weights = jax.eval_shape(model.init, jax.random.key(0))
  _, layout = programs.publisher.program(weights)
  cut = jax.eval_shape(
    lambda x: model.split_layers(precision.cast(x, model.config.dtype)), weights
  )
  params = jax.tree.map(placed, cut, layout)
  layout = slot_state.shardings(model, mesh, 1)
  empty = jax.eval_shape(lambda: slot_state.empty(model, _A, (_J,)))
  state = jax.tree.map(placed, empty, layout)
  lowered = programs.decode.lower(
    params,
    state,
    None,
    placed(jax.ShapeDtypeStruct((_A, 2), jnp.uint32), layout.lengths),
    np.zeros((3, 12), np.uint8),
    False,
    _A,
    num_blocks=1,
  )
  return lowered, state.cache, params


def _per_device(tree):
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


# Keys and values are cut by heads; or by slots, with as many devices as that.
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
  lowered, cache, _ = _lowered(model, devices, tensor)
  compiled = lowered.compile()
  memory = compiled.memory_analysis()
  size = _per_device(cache)
  assert size == 2 * 2 * _A * 2 * _J * 8 * 4 / devices  # layers, k and v, heads
  assert memory.alias_size_in_bytes >= size
  assert memory.temp_size_in_bytes < size / 2
  text = compiled.as_text()
  # What devices send for each token has no axis of the cache's length, and is
  # no larger than the hidden states of all slots.
  sent = [x for c in program.collectives(text) for _, x in c.arrays]
  assert sent and max(map(math.prod, sent)) <= _A * 48
  assert all(_J not in dims for dims in sent)
  # No array repeats keys or values for the query heads that share them.
  keys = math.prod(cache[0][0][0].sharding.shard_shape(cache[0][0][0].shape))
  of_cache = [
    math.prod(dims)
    for line in program.instructions(text)
    for _, dims in line.arrays
    if _J in dims and 8 in dims
  ]
  assert of_cache and max(of_cache) == keys


def test_weights_are_read_in_the_dtype_of_the_computation():
  lowered, _, params = _lowered(_MODEL, 1, 1)
  converted = re.findall(
    r'convert %\S+ : \(tensor<([\dx]+)xbf16>\) -> tensor<[\dx]+xf32>',
    lowered.as_text(),
  )
  shapes = {'x'.join(map(str, x.shape)) for x in jax.tree.leaves(params)}
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

  def decode(self, params, state, slots_A, key_data_A2, *args, **static):
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
