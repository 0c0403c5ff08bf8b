"""The formulas count what a model of published size computes."""

import dataclasses
import pathlib

import pytest

from stppo_jax.models import flops
from stppo_jax.models.hf import load

# The shape of Qwen2.5-1.5B.
_SHAPE = load.read_config(
  pathlib.Path(__file__).parent / 'published' / 'qwen2_5_1_5b'
)


def test_operations_are_those_of_the_published_shapes():
  # Qwen2.5-1.5B has 1.31e9 weights in its layers and 0.23e9 in its embedding
  # (its model card), and a product with a weight is two operations.
  layers = flops.layer_operations(_SHAPE, 0)
  assert layers == pytest.approx(2 * 1.31e9, rel=5e-3)
  # Two products with half of 4096 tokens, for each of 12 heads of 128.
  attention = flops.layer_operations(_SHAPE, 4096) - layers
  assert attention == 28 * 2 * 2 * 2048 * 12 * 128
  policy, value = flops.forward_operations(_SHAPE, [4096, 4096], losses=100)
  assert value == 2 * 4096 * (layers + attention)
  assert policy - value == pytest.approx(100 * 2 * 0.233e9, rel=5e-3)


def test_queries_see_no_more_than_a_window():
  length, window = 4096, 1024
  seen = sum(min(n, window) for n in range(1, length + 1)) / length
  mixed = dataclasses.replace(_SHAPE, windows=(window,) * 20 + (0,) * 8)
  keys = 20 * seen + 8 * length / 2
  operations = flops.attention_operations(mixed, length)
  assert operations == pytest.approx(2 * 2 * keys * 12 * 128, rel=1e-3)
  # A row that fits into the window is computed as without it.
  assert flops.attention_operations(mixed, 1000) == (
    flops.attention_operations(_SHAPE, 1000)
  )


def test_of_experts_those_count_that_a_token_visits():
  experts = dataclasses.replace(
    _SHAPE,
    qkv_bias=False,
    qk_norm=True,
    num_experts=64,
    num_experts_per_tok=8,
    moe_intermediate_size=1120,
  )
  weights = flops.layer_weights(experts)
  assert weights.expand == 1536 * (2 * 8 * 1120 + 64)  # with the router
  assert weights.contract == 1536 * 8 * 1120
  router = 28 * 2 * 1536 * 64
  dense = flops.layer_operations(_SHAPE, 512)
  assert flops.layer_operations(experts, 512) == dense + router
  mixed = dataclasses.replace(experts, dense_layers=(0, 3, 4))
  router = 25 * 2 * 1536 * 64
  assert flops.layer_operations(mixed, 512) == dense + router


@pytest.mark.parametrize('remat', ['full', 'dots', 'all_dots', 'none'])
def test_what_a_backward_pass_does_again_depends_on_what_is_kept(remat):
  shape = dataclasses.replace(_SHAPE, remat=remat)
  policy, value = flops.recomputed_operations(shape, [4096], losses=100)
  # Logits are always computed again.
  assert policy - value == 100 * flops.logit_operations(shape)
  attention = 4096 * 28 * 2 * 2 * 2048 * 12 * 128
  down = 4096 * 28 * 2 * 8960 * 1536
  everything = 4096 * flops.layer_operations(shape, 4096)
  expected = {'full': everything - down, 'dots': attention}
  assert value == expected.get(remat, 0)
