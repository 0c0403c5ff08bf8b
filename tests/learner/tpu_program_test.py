"""The update as it is compiled for sixteen TPU chips that are not there.

It needs the compiler for TPU, `pip install libtpu`, and is skipped without it.
"""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from stppo_jax.learner import learner as learner_lib
from stppo_jax.models import heads
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from stppo_jax.parallel import topology
from stppo_jax.tools.plan import hlo
from stppo_jax.tools.plan import hlo_cost
from stppo_jax.tools.plan import lowering
from tests.learner import abstract_batch
from tests.models import tiny
from tests.parallel import tpu_compiler
from tests.training import runs

pytestmark = tpu_compiler.MARKS

_V, _D, _LENGTH, _NUM_MICROBATCHES = 8192, 512, 512, 4
_DATA, _FSDP = 2, 8
# An output matrix of its own: with one, the compiler used to fail in the motion
# of a sum over devices out of the loop over microbatches.
_SHAPE = tiny.model(
  vocab_size=_V,
  hidden_size=_D,
  intermediate_size=4096,
  num_heads=4,
  num_kv_heads=2,
  head_dim=128,
  dtype='bfloat16',
  remat='full',
  attention='splash',
).config


class _Compiled(NamedTuple):
  params: object  # shapes of policy and value model
  collectives: list[hlo_cost.Collective]
  text: str


@functools.cache
def _compiled() -> _Compiled:
  devices = topology.devices(topology.find('v5e:4x4'))
  mesh = mesh_lib.make_mesh(data=_DATA, fsdp=_FSDP, tensor=1, devices=devices)
  rows = len(devices) * _NUM_MICROBATCHES
  config = runs.config(
    'turn_ppo',
    rollout__trajectories_per_step=2 * rows,
    updates__minibatch_size=rows,
    updates__microbatch_size=len(devices),
    updates__head_chunk=4096,
  )
  learner = learner_lib.Learner(config, _SHAPE, mesh)
  state, _ = learner.abstract_start()
  compiled = topology.compiled(
    lowering.lower_update(
      learner, abstract_batch.packed(2 * rows, _LENGTH, _LENGTH // 2)
    )
  )
  text = compiled.as_text()
  params = state.policy.params, state.value.params
  return _Compiled(params, hlo_cost.collectives(hlo.read(text)), text)


def _size(params, name):
  """Returns the number of weights with a name."""
  return sum(
    leaf.size
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    if re.search(name, jax.tree_util.keystr(path, simple=True, separator='/'))
  )


def test_a_device_sends_what_the_fsdp_formula_says():
  params, collectives, _ = _compiled()
  layers, output = _size(params, 'layers/.*kernel'), _size(params, 'lm_head')
  part = (_FSDP - 1) / _FSDP
  # Of each microbatch, layers are gathered for both passes, and gradients are
  # scattered over fsdp; data sums what is left of them.
  gathered = _NUM_MICROBATCHES * 2 * layers + output
  scattered = _NUM_MICROBATCHES * (layers + output)
  summed = 2 * (_DATA - 1) / _DATA * scattered / _FSDP
  # Embedded tokens are exchanged in both passes of both models.
  exchanged = _NUM_MICROBATCHES * 2 * 2 * _LENGTH * _D
  # All of it is bfloat16.
  formula = 2 * (part * (gathered + scattered + exchanged) + summed)
  sent = sum(c.sent for c in collectives)
  assert 0.9 * formula < sent < 1.1 * formula


def test_layers_scatter_gradients_in_the_dtype_of_the_activations():
  _, collectives, _ = _compiled()
  sums = [
    (c.kind, dtype)
    for c in collectives
    for dtype, *_ in c.arrays
    if c.kind in ('reduce-scatter', 'all-reduce')
    and c.devices == _FSDP
    and c.times == _NUM_MICROBATCHES * _SHAPE.num_layers
  ]
  assert set(sums) == {('reduce-scatter', 'bf16')}


def test_the_embedding_is_not_sent():
  _, collectives, _ = _compiled()
  of_words = [c for c in collectives if any(_V in x.dims for x in c.arrays)]
  # The output matrix only: gathered once, its gradient summed once for each
  # microbatch, over data perhaps after the last.
  assert {(c.kind, c.times) for c in of_words} <= {
    ('all-gather', 1),
    ('reduce-scatter', _NUM_MICROBATCHES),
    ('all-reduce', _NUM_MICROBATCHES),
    ('all-reduce', 1),
  }


def test_products_are_not_computed_in_windows():
  _, collectives, text = _compiled()
  assert 'windowed_dot_general' not in text
  assert 'collective-permute' not in {c.kind for c in collectives}


def test_layers_are_gathered_while_others_compute():
  assert 'async_collective_fusion' in _compiled().text


def test_the_gradient_of_the_vocabulary_of_qwen_is_scattered():
  # 128 x 1187 entries, which cannot be cut into small equal blocks.
  entries, width, rows = 151_936, 1536, 8
  chips = topology.devices(topology.find('v6e:2x4'))
  mesh = mesh_lib.make_mesh(data=1, fsdp=8, tensor=1, devices=chips)
  by_row = sharding.batch_sharding(mesh)
  layout = by_row, NamedSharding(mesh, P('tensor', 'fsdp')), by_row

  def total(hidden_BLD, output_VD, tokens_BL):
    logprobs_BL, _ = heads.token_logprobs_and_entropy(
      hidden_BLD, output_VD, tokens_BL, temperature=1.0, chunk=128, mesh=mesh
    )
    return jnp.sum(logprobs_BL)

  of = lambda n, dtype, *shape: jax.ShapeDtypeStruct(
    shape, dtype, sharding=layout[n]
  )
  gradient = jax.jit(jax.grad(total, (0, 1)), out_shardings=layout[:2])
  compiled = topology.compiled(
    gradient.lower(
      of(0, jnp.bfloat16, rows, 257, width),
      of(1, jnp.bfloat16, entries, width),
      of(2, jnp.int32, rows, 257),
    )
  )
  found = hlo_cost.collectives(hlo.read(compiled.as_text()))
  large = {c.kind for c in found if c.size > entries * width}
  assert large == {'all-gather', 'reduce-scatter'}
