"""The compiled update: what devices send, hold and multiply.

Read from the program of a run's learner, compiled for eight virtual devices.
"""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

import jax
import pytest

from stppo_jax.learner import learner as learner_lib
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.tools.plan import hlo
from stppo_jax.tools.plan import hlo_cost
from stppo_jax.tools.plan import lowering
from tests import compilations
from tests.learner import abstract_batch
from tests.models import tiny
from tests.training import runs

# Weights are large beside everything else, as in models that need sharding. The
# vocabulary is far larger than any other axis, so that logits are recognised.
_V, _D, _NUM_LAYERS, _LENGTH, _NUM_LOSSES, _CHUNK = 2048, 32, 2, 64, 48, 24
_ROWS_PER_DEVICE = 2
_SHAPE = tiny.model(
  vocab_size=_V,
  hidden_size=_D,
  intermediate_size=192,
  num_layers=_NUM_LAYERS,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
).config
_FSDP, _ALL_AXES, _ALONE = (1, 8, 1), (2, 2, 2), (1, 1, 1)
_MESHES = pytest.mark.parametrize('axes', [_FSDP, _ALL_AXES])
# Each takes a compilation. What a vocabulary that `tensor` shards sends is
# tested every time in models/vocabulary_mesh_test.py.
pytestmark = pytest.mark.slow


class _Compiled(NamedTuple):
  state: object  # shapes and layouts
  program: object
  text: str


@functools.cache
def _compiled(
  axes, num_microbatches=1, remat='none', rank=0, gathers_base=False
) -> _Compiled:
  """Returns the compiled update on two rows per device."""
  devices = math.prod(axes)
  rows = devices * _ROWS_PER_DEVICE * num_microbatches
  mesh = mesh_lib.make_mesh(
    **dict(zip(('data', 'fsdp', 'tensor'), axes)),
    devices=jax.devices()[:devices],
  )
  config = runs.config(
    'turn_ppo',
    rollout__trajectories_per_step=rows,
    updates__minibatch_size=rows,
    updates__microbatch_size=rows // num_microbatches,
    updates__head_chunk=_CHUNK,
    model__lora__rank=rank,
  )
  shape = dataclasses.replace(_SHAPE, remat=remat)
  learner = learner_lib.Learner(config, shape, mesh, gathers_base=gathers_base)
  state, _ = learner.abstract_start()
  lowered = lowering.lower_update(
    learner, abstract_batch.packed(rows, _LENGTH, _NUM_LOSSES)
  )
  compiled = lowered.compile(compiler_options=compilations.QUICK)
  return _Compiled(state, compiled, compiled.as_text())


def _bytes(tree, only=''):
  """Returns the bytes of float32 leaves on all devices together."""
  return sum(
    4 * leaf.size
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    if re.search(only, jax.tree_util.keystr(path, simple=True, separator='/'))
  )


def _fsdp_formula(state, devices, *, num_microbatches):
  """Returns the bytes that a device sends in an update, n devices in a ring.

      (n - 1) / n x (gathered + scattered + exchanged)

  Layers are gathered in the forward and in the backward pass (which also
  computes again with them) of every microbatch; the output matrix once, before
  the loops. Gradients of every microbatch are summed and cut: on CPU by an
  all-reduce, which sends twice what a reduce-scatter would, but for the output
  matrix. Embeddings and their gradients stay where they are; what is exchanged
  are the embedded tokens of a device's rows and their gradients, for each of
  two models.
  """
  params = [state.policy.params, state.value.params]
  layers, output = _bytes(params, 'layers/.*kernel'), _bytes(params, 'lm_head')
  summed = _bytes(params) - output - _bytes(params, 'embedding')
  gathered = num_microbatches * 2 * layers + output
  scattered = num_microbatches * (2 * summed + output)
  tokens = num_microbatches * _ROWS_PER_DEVICE * _LENGTH
  exchanged = 2 * 2 * tokens * _D * 4
  return (devices - 1) / devices * (gathered + scattered + exchanged)


@pytest.mark.parametrize(
  ('num_microbatches', 'remat'), [(1, 'none'), (2, 'none'), (1, 'full')]
)
def test_bytes_are_those_of_the_fsdp_formula(num_microbatches, remat):
  state, _, text = _compiled(_FSDP, num_microbatches, remat)
  sent = sum(c.sent for c in hlo_cost.collectives(hlo.read(text)))
  expected = _fsdp_formula(state, 8, num_microbatches=num_microbatches)
  assert sent == pytest.approx(expected, rel=0.05)


def test_the_frozen_base_is_gathered_once_for_both_models():
  """And not in both passes of two models over each of two microbatches."""
  kernels = {}
  for gathers_base in (False, True):
    _, _, text = _compiled(
      _FSDP, num_microbatches=2, rank=2, gathers_base=gathers_base
    )
    gathered = [
      c for c in hlo_cost.collectives(hlo.read(text)) if c.kind == 'all-gather'
    ]
    kernels[gathers_base] = sum(
      c.sent for c in gathered if any(192 in x.dims for x in c.arrays)
    )
  assert kernels[True] == 4 * 7 / 8 * _NUM_LAYERS * 3 * 192 * _D
  assert kernels[False] > 3 * kernels[True]


@_MESHES
def test_logits_are_neither_sent_nor_held(axes):
  _, _, text = _compiled(axes)
  rows = _ROWS_PER_DEVICE * 8 // (axes[0] * axes[1])
  width = _V // axes[2]
  # Half of the float32 logits of the tokens that carry loss.
  limit = rows * _NUM_LOSSES * width * 2
  for collective in hlo_cost.collectives(hlo.read(text)):
    for _, shape, _ in collective.arrays:
      # Of arrays over the vocabulary, devices send columns of weights only.
      if set(shape) & {_V, width}:
        columns = math.prod(shape) // max(shape)
        assert len(shape) == 2 and _D % columns == 0, collective
  largest = max(
    line.size
    for line in hlo.read(text).instructions
    if len(line.arrays) == 1  # a tuple is no buffer
  )
  assert _CHUNK * width * 4 <= largest < limit


@_MESHES
def test_the_state_is_written_in_place(axes):
  state, compiled, _ = _compiled(axes)
  held = sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(state)
  )
  assert compiled.memory_analysis().alias_size_in_bytes >= 0.99 * held


@_MESHES
def test_devices_multiply_as_much_as_one_of_its_rows(axes):
  alone = hlo_cost.operations(hlo.read(_compiled(_ALONE).text))
  assert hlo_cost.operations(hlo.read(_compiled(axes).text)) == pytest.approx(
    alone, rel=0.02
  )
  # Forward and backward pass of the layers alone, of all tokens.
  layers = _bytes(_compiled(_ALONE).state.policy.params, 'layers/.*kernel') / 4
  assert alone > 2 * 6 * layers * _ROWS_PER_DEVICE * _LENGTH
