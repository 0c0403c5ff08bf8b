"""The programs of every family as they are compiled for TPU.

They need the compiler for TPU, `pip install libtpu`, and are skipped without
it. Layers are as wide as in small models that people have, but few.
"""

import functools

import jax
import pytest

from stppo_jax.learner import learner as learner_lib
from stppo_jax.models import cached_pass
from stppo_jax.models import functional
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import publish
from stppo_jax.parallel import sharding
from stppo_jax.parallel import topology
from stppo_jax.sampling import lowering as engine_lowering
from stppo_jax.tools.plan import lowering
from tests.learner import abstract_batch
from tests.models import tiny
from tests.parallel import tpu_compiler
from tests.sampling import tiny_engine
from tests.training import runs

pytestmark = tpu_compiler.MARKS

_ROWS, _LENGTH, _LOSSES = 8, 1024, 256
# Slices and the meshes of the configs that are shipped for them.
_SLICES = {
  'v5e:2x4': {'data': 1, 'fsdp': 8, 'tensor': 1},
  'v5p:2x2x1': {'data': 1, 'fsdp': 2, 'tensor': 2},
}
# The others, which are older, have no block that these lack.
_KINDS = ('mistral', 'phi3', 'gemma3_text', 'olmo2', 'olmo3', 'qwen3_moe')


def _shape(kind):
  shape = dict(
    vocab_size=2048,
    hidden_size=512,
    intermediate_size=1024,
    num_heads=4,
    num_kv_heads=2,
    head_dim=256 if kind == 'gemma3_text' else 128,
    dtype='bfloat16',
    remat='full',
    attention='splash',
    moe='grouped',
  )
  shape |= tiny.of_family(kind, window=512)
  if kind == 'qwen3_moe':  # a layer without experts before one with them
    shape |= {'dense_layers': (0,), 'moe_intermediate_size': 256}
  return tiny.model(**shape).config


@functools.cache
def _mesh(name):
  chips = topology.devices(topology.find(name))
  return mesh_lib.make_mesh(**_SLICES[name], devices=chips)


def _kernels(text):
  """Returns how many kernels a program has."""
  return text.count('custom_call_target="tpu_custom_call"')


@pytest.mark.parametrize('name', _SLICES)
@pytest.mark.parametrize('kind', _KINDS)
def test_an_update_compiles(kind, name):
  config = runs.config(
    'turn_ppo',
    rollout__trajectories_per_step=2 * _ROWS,
    updates__minibatch_size=_ROWS,
    updates__microbatch_size=_ROWS,
  )
  learner = learner_lib.Learner(config, _shape(kind), _mesh(name))
  batch = abstract_batch.packed(2 * _ROWS, _LENGTH, _LOSSES)
  compiled = topology.compiled(lowering.lower_update(learner, batch))
  # Layers of two kinds have a kernel each, in one loop over layers.
  kinds = len(set(_shape(kind).layer_windows))
  assert _kernels(compiled.as_text()) % kinds == 0
  assert _kernels(compiled.as_text()) >= 3 * kinds  # forward, and two back


@pytest.mark.parametrize('name', _SLICES)
@pytest.mark.parametrize('kind', _KINDS)
def test_decoding_compiles(kind, name):
  shape, mesh = _shape(kind), _mesh(name)
  assert cached_pass.reads_live(shape, 128)
  model = functional.Model(shape, 'vocabulary', mesh=mesh)
  weights = jax.eval_shape(model.init, jax.random.key(0))
  programs = engine_lowering.Lowering(
    model,
    placement=publish.Placement(
      mesh, _SLICES[name]['tensor'], host=0, spans_slice=True
    ),
    options=tiny_engine.options(
      slots=16,
      max_length=_LENGTH,
      page_size=128,
      decode_chunk=8,
      prefill_chunk=128,
    ),
    num_states=19,
    trained=sharding.with_layout(
      weights, sharding.param_shardings(weights, mesh)
    ),
  )
  for lower in (programs.decode, programs.extend):
    assert _kernels(topology.compiled(lower()).as_text()) >= shape.num_layers
