"""Reads in compiled programs what decoding holds, reads and sends.

A is the number of slots, J the length of a slot's cache; both are unlike every
other size, so that arrays can be told apart by their dimensions.
"""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import numpy as np
import pytest

from stppo_jax.models import cache as cache_lib
from stppo_jax.parallel import memory as memory_lib
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.sampling import compiled_programs
from stppo_jax.sampling import engine_options
from stppo_jax.sampling import slot_calls
from stppo_jax.sampling import slot_driver
from stppo_jax.tools.plan import hlo
from stppo_jax.tools.plan import hlo_cost
from tests.models import tiny
from tests.sampling import tiny_engine

_A, _J = 40, 1000
_SHAPE = dict(num_layers=1, num_heads=4, num_kv_heads=2, vocab_size=12)
_MODEL = tiny.model(**_SHAPE, hidden_size=48, dtype='bfloat16')


def _lowering(model, devices, tensor, **changes):
  return tiny_engine.lowered(
    model,
    tiny_engine.placement(devices, tensor),
    slots=_A,
    max_length=_J,
    page_size=_J,
    decode_chunk=5,
    **changes,
  )


# Keys and values are cut by heads; or by slots, with as many devices as that.
@pytest.mark.parametrize(
  ('devices', 'tensor', 'rows'),
  [
    (4, 2, 5),
    pytest.param(4, 2, 0, marks=pytest.mark.slow),
    pytest.param(4, 4, 0, marks=pytest.mark.slow),
    pytest.param(4, 4, 5, marks=pytest.mark.slow),
  ],
)
def test_decoding_on_devices_copies_each_row_s_pages_once_and_sends_none(
  devices, tensor, rows
):
  model = dataclasses.replace(
    _MODEL, config=dataclasses.replace(_MODEL.config, dtype='float32')
  )
  some = {'deterministic': False, 'batch_rows': rows} if rows else {}
  engine = _lowering(model, devices, tensor, **some)
  cache, compiled = engine.state.cache, engine.decode().compile()
  memory = compiled.memory_analysis()
  size = memory_lib.bytes_per_device(cache)
  assert size == 2 * _A * 2 * _J * 8 * 4 / devices  # k and v, heads
  assert memory.alias_size_in_bytes >= size
  of_device = _A // cache_lib.row_shards(
    model.config, tiny_engine.placement(devices, tensor).mesh
  )
  copied = (rows or of_device) * size / of_device
  assert copied <= memory.temp_size_in_bytes < copied + size / 2
  text = compiled.as_text()
  # What devices send for each token has no axis of the cache's length, and is
  # no larger than the hidden states of all slots.
  sent = [
    x.dims for c in hlo_cost.collectives(hlo.read(text)) for x in c.arrays
  ]
  assert sent and max(map(math.prod, sent)) <= _A * 48
  assert all(_J not in dims for dims in sent)
  # No array repeats keys or values for the query heads that share them.
  keys = math.prod(cache[0][0].sharding.shard_shape(cache[0][0].shape))
  of_cache = [
    math.prod(dims)
    for line in hlo.read(text).instructions
    for _, dims, _ in line.arrays
    if _J in dims and 8 in dims
  ]
  assert of_cache and max(of_cache) == keys


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


def _like_on_a_gpu(monkeypatch):
  """Builds programs as those for GPUs, which the devices of a CPU run, too."""
  monkeypatch.setattr(mesh_lib, 'platform', lambda mesh: 'gpu')
  uncached = compiled_programs.build.__wrapped__
  monkeypatch.setattr(compiled_programs, 'build', uncached)


def test_on_gpus_a_chunk_has_no_branch_and_loops_of_known_length(monkeypatch):
  _like_on_a_gpu(monkeypatch)
  text = _lowering(_MODEL, 1, 1).decode().compile().as_text()
  assert ' conditional(' not in text
  loops = re.findall(r'^.* while\(.*$', text, re.M)
  assert loops and all('known_trip_count' in line for line in loops)
  assert any('"known_trip_count":{"n":"5"}' in line for line in loops)


@pytest.mark.slow
def test_chunks_without_branches_have_the_same_tokens(monkeypatch):
  run = functools.partial(tiny_engine.dialogues, rows=6)
  expected = [run(tiny_engine.engine(), greedy=x) for x in (False, True)]
  _like_on_a_gpu(monkeypatch)
  engine, _ = tiny_engine.new_engine(decode_chunk=4, page_size=40)
  for greedy, dialogues in zip((False, True), expected):
    tiny_engine.assert_all_same(run(engine, greedy=greedy), dialogues)


class _Shapes:
  """Stands in for compiled programs; records how many slots they run on."""

  shards, num_hosts, page_size, pages_per_row = 1, 1, 64, 1
  params = table_ZV = None
  takes_any_number = True

  def __init__(self):
    self.sizes, self.num_pages = set(), set()

  def put(self, *trees):
    return trees

  def decode(self, params, state, key_data_A2, *args, **kwargs):
    self.sizes.add(len(key_data_A2))
    self.num_pages.add(kwargs['num_pages'])
    return state, None


@pytest.mark.parametrize('slots', [64, 100, 7])
def test_batches_have_at_most_four_sizes(slots):
  shapes: Any = _Shapes()
  options: engine_options.EngineOptions = tiny_engine.options(
    slots=slots, deterministic=False
  )
  driver = slot_driver.SlotDriver(shapes, options)
  for count in range(1, slots + 1):
    chosen = {
      n: slot_calls.Decode(np.zeros(2, np.uint32), 1, [n]) for n in range(count)
    }
    driver.decode(chosen, {}, greedy=False, enough=1)
  assert max(shapes.sizes) == slots and len(shapes.sizes) <= 4


def test_where_each_number_of_pages_is_compiled_there_are_few():
  shapes: Any = _Shapes()
  shapes.takes_any_number, shapes.pages_per_row = False, 20
  driver = slot_driver.SlotDriver(shapes, tiny_engine.options())
  for length in range(1, 20 * 64 + 1, 16):
    decode = slot_calls.Decode(np.zeros(2, np.uint32), length, [0])
    driver.decode({0: decode}, {}, greedy=False, enough=1)
  assert shapes.num_pages == {1, 2, 4, 8, 16, 20}
