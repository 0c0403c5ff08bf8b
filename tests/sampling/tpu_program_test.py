"""The engine's programs as they are compiled for TPU chips that are not there.

They need the compiler for TPU, `pip install libtpu`, and are skipped without
it. The model is Qwen2.5-1.5B with few layers, on a host with four chips.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import pytest

from stppo_jax.models import config as model_config
from stppo_jax.models import flops
from stppo_jax.models import functional
from stppo_jax.parallel import memory as memory_lib
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import publish
from stppo_jax.parallel import topology
from stppo_jax.sampling import lowering
from stppo_jax.tools.plan import hlo
from stppo_jax.tools.plan import hlo_cost
from stppo_jax.training import model_files
from tests.parallel import tpu_compiler
from tests.sampling import tiny_engine
from tests.training import runs

pytestmark = tpu_compiler.MARKS

_LAYERS, _SLOTS, _LENGTH, _CHUNK = 4, 64, 4096, 16
_CHIPS, _TENSOR = 4, 2


@functools.cache
def _shape() -> model_config.ModelConfig:
  config = runs.config(
    model__path=str(runs.REPO / 'tests/models/published/qwen2_5_1_5b'),
    model__dtype='bfloat16',
  )
  shape = model_files.shape(config, None)
  return dataclasses.replace(shape, num_layers=_LAYERS, attention='splash')


@functools.cache
def _lowering(name: str = 'v5e:2x2') -> lowering.Lowering:
  """Returns the programs of a slice, which its hosts call together."""
  chips = topology.devices(topology.find(name))
  mesh = mesh_lib.make_mesh(data=-1, fsdp=_CHIPS, tensor=1, devices=chips)
  model = functional.Model(_shape(), 'vocabulary', mesh=mesh)
  return tiny_engine.lowered(
    model,
    publish.Placement(mesh, _TENSOR, host=0, spans_slice=True),
    slots=_SLOTS,
    max_length=_LENGTH,
    page_size=128,
    decode_chunk=_CHUNK,
    prefill_chunk=256,
  )


class _Compiled(NamedTuple):
  memory: Any
  text: str


@functools.cache
def _compiled(name: str) -> _Compiled:
  compiled = topology.compiled(getattr(_lowering(), name)())
  return _Compiled(compiled.memory_analysis(), compiled.as_text())


def test_decoding_reads_little_more_than_weights_keys_and_values():
  # The kernel says what it reads of rows of the greatest length.
  needed = memory_lib.bytes_per_device(
    _lowering().weights
  ) + memory_lib.bytes_per_device(_lowering().state.cache)
  accessed = hlo_cost.accessed(hlo.read(_compiled('decode').text)) / _CHUNK
  assert needed < accessed < 1.15 * needed


@pytest.mark.parametrize(
  ('name', 'tokens'), [('decode', _CHUNK), ('extend', 256)]
)
def test_the_products_are_those_of_the_formula(name, tokens):
  shape = _shape()
  # Each token attends to all positions, not to half of them.
  per_token = flops.layer_operations(shape, 2 * _LENGTH)
  if name == 'decode':
    per_token += flops.logit_operations(shape)
  needed = _SLOTS * tokens * per_token / _CHIPS
  counted = hlo_cost.operations(hlo.read(_compiled(name).text))
  assert counted == pytest.approx(needed, rel=0.1)


@pytest.mark.parametrize('name', ['decode', 'extend'])
def test_the_cache_is_updated_in_place(name):
  memory = _compiled(name).memory
  size = memory_lib.bytes_per_device(_lowering().state.cache)
  assert memory.alias_size_in_bytes >= size
  if name == 'decode':
    assert memory.temp_size_in_bytes < size / 2


def test_no_program_has_a_float32_copy_of_the_weights():
  matrices = {
    x.sharding.shard_shape(x.shape)
    for x in jax.tree.leaves(_lowering().weights)
    if x.ndim > 1
  }
  of_f32 = {
    dims
    for line in hlo.read(_compiled('decode').text).instructions
    for kind, dims, _ in line.arrays
    if kind == 'f32' and not line.kernel
  }
  assert len(matrices) > 4 and of_f32 and not matrices & of_f32


@pytest.mark.parametrize(
  ('name', 'counts'),
  # How many dialogues generate: at first, and before each token.
  [('extend', 0), ('decode', 2)],
)
def test_hosts_that_decode_together_exchange_only_counts(name, counts):
  lowered = getattr(_lowering('v5e:4x4'), name)()
  found = hlo_cost.collectives(hlo.read(topology.compiled(lowered).as_text()))
  mesh = {'data': 8, 'fsdp': 1, 'tensor': _TENSOR}
  # The weights are cut over chips of one host.
  others = [c for c in found if c.axes(mesh) != ('tensor',)]
  assert [collective.size for collective in others] == [4] * counts


def test_publishing_sends_what_the_formula_says():
  weights = jax.tree.leaves(_lowering().weights)
  size = sum(2 * x.size for x in weights if x.ndim > 1)  # bfloat16
  exchanged = size / _CHIPS * (_TENSOR - 1) / _TENSOR
  gathered = size / _TENSOR * (1 - _TENSOR / _CHIPS)
  compiled = [
    (topology.compiled(lowered), times)
    for lowered, times in _lowering().publish()
  ]
  found, sent = [], 0
  for part, times in compiled:
    collectives = hlo_cost.collectives(hlo.read(part.as_text()))
    found += collectives
    sent += times * sum(collective.sent for collective in collectives)
  # At most one array of a part is there twice: the embedding, or of a layer.
  for part, _ in compiled:
    memory = part.memory_analysis()
    results = memory.output_size_in_bytes
    own = memory.peak_memory_in_bytes - memory.argument_size_in_bytes - results
    assert own < 1.1 * max(
      2 * math.prod(x.sharding.shard_shape(x.shape)) for x in weights
    )
  assert sent == pytest.approx(exchanged + gathered, rel=0.03)
  dtypes = {x.kind for c in found for x in c.arrays if len(x.dims) > 1}
  assert dtypes == {'bf16'}
