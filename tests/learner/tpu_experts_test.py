"""The update of a mixture of experts as it is compiled for TPU.

It needs the compiler for TPU, `pip install libtpu`, and is skipped without it.
"""

import dataclasses
import functools

import pytest

from stppo_jax.learner import learner as learner_lib
from stppo_jax.models import flops
from stppo_jax.models import roofline
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import topology
from stppo_jax.tools.plan import hlo
from stppo_jax.tools.plan import hlo_cost
from stppo_jax.tools.plan import lowering
from stppo_jax.training import metrics
from tests.learner import abstract_batch
from tests.models import tiny
from tests.parallel import tpu_compiler
from tests.training import runs

pytestmark = tpu_compiler.MARKS

_ROWS, _LENGTH, _LOSSES = 8, 512, 256
_EXPERTS, _VISITED, _FSDP, _TENSOR = 16, 2, 2, 2
_SHAPE = tiny.model(
  vocab_size=1024,
  hidden_size=256,
  intermediate_size=512,
  num_kv_heads=2,
  head_dim=128,
  qkv_bias=False,
  qk_norm=True,
  num_experts=_EXPERTS,
  num_experts_per_tok=_VISITED,
  moe_intermediate_size=512,
  dtype='bfloat16',
  remat='full',
  attention='splash',
  moe='grouped',
).config


@functools.cache
def _text(expert: int = 1) -> tuple[str, float]:
  """Returns the compiled update, and the bytes that it sends by formula."""
  devices = topology.devices(topology.find('v5p:2x2x1'))
  tensor = _TENSOR // expert
  # With 128 columns or fewer for each chip, the compiler scatters no sums.
  shape = dataclasses.replace(_SHAPE, hidden_size=1024 if expert > 1 else 256)
  mesh = mesh_lib.make_mesh(
    data=1, fsdp=_FSDP, expert=expert, tensor=tensor, devices=devices
  )
  config = runs.config(
    'turn_ppo',
    rollout__trajectories_per_step=2 * _ROWS,
    updates__minibatch_size=_ROWS,
    updates__microbatch_size=_FSDP * expert,
  )
  learner = learner_lib.Learner(config, shape, mesh)
  work = metrics.work(config, learner, None, length=_LENGTH, losses=_LOSSES)
  text = topology.compiled(
    lowering.lower_update(
      learner, abstract_batch.packed(2 * _ROWS, _LENGTH, _LOSSES)
    )
  ).as_text()
  return text, roofline.update_sent(work) / work.updates


def test_only_visited_experts_are_computed():
  # The kernel of attention does not say how much it computes.
  layers = 3 * flops.layer_operations(_SHAPE, 0)
  layers += flops.recomputed_layer_operations(_SHAPE, 0)
  logits = 4 * flops.logit_operations(_SHAPE)
  both = _ROWS * (2 * _LENGTH * layers + _LOSSES * logits)
  found = hlo_cost.operations(hlo.read(_text()[0]))
  assert found == pytest.approx(both / _FSDP / _TENSOR, rel=0.1)


def test_rows_are_not_copied_for_every_expert():
  visits = _LENGTH * _VISITED
  sizes = [
    dims
    for line in hlo.read(_text()[0]).instructions
    for _, dims, _ in line.arrays
    if {_EXPERTS, visits} <= set(dims) and len(dims) > 2
  ]
  assert not sizes


def test_devices_send_what_the_formula_says():
  text, formula = _text(expert=2)
  sent = sum(x.sent for x in hlo_cost.collectives(hlo.read(text)))
  assert sent == pytest.approx(formula, rel=0.1)
