"""A mesh divides a model, or is refused with the sizes that would fit."""

import dataclasses

import pytest

from stppo_jax.models import functional
from stppo_jax.parallel import mesh as mesh_lib
from tests.models import tiny

_CUT = {
  'fsdp': {'hidden_size': 48},
  'tensor': {'num_heads': 24, 'vocab_size': 120},
}


def _check(fsdp, tensor, expert=1, num_kv_heads=4, cut=_CUT):
  mesh = mesh_lib.make_mesh(data=-1, fsdp=fsdp, expert=expert, tensor=tensor)
  mesh_lib.check_divides(mesh, cut, num_kv_heads=num_kv_heads)


@pytest.mark.parametrize(
  ('fsdp', 'tensor', 'num_kv_heads'),
  # In the last two, a key and value head is on two and on four devices.
  [(1, 1, 4), (8, 1, 4), (2, 4, 4), (1, 8, 4), (2, 4, 1)],
)
def test_meshes_that_divide_are_accepted(fsdp, tensor, num_kv_heads):
  _check(fsdp, tensor, num_kv_heads=num_kv_heads)


@pytest.mark.parametrize(
  ('sizes', 'changes', 'message'),
  [
    (
      (1, 8),
      {'cut': {'tensor': {'num_heads': 28, 'vocab_size': 124}}},
      'tensor=8 .* num_heads=28, vocab_size=124; .* may be 1, 2, 4$',
    ),
    ((1, 2), {'num_kv_heads': 3}, 'tensor=2 .*num_kv_heads=3; .* 1, 3, 6$'),
    (
      (8, 1),
      {'cut': {'fsdp': {'hidden_size': 12}}},
      'fsdp=8 .* hidden_size=12; .* fsdp may be 1, 2, 3, 4, 6$',
    ),
    (
      (1, 1, 4),
      {'cut': {'expert': {'num_experts': 6}}},
      'expert=4 does not divide num_experts=6; .* expert may be 1, 2, 3, 6$',
    ),
    # The width is cut over both axes.
    (
      (2, 1, 4),
      {'cut': {'fsdp': {'hidden_size': 12}}},
      'fsdp=2 with expert=4 .* hidden_size=12; .* fsdp may be 1$',
    ),
  ],
)
def test_other_meshes_are_refused_with_sizes_that_fit(sizes, changes, message):
  with pytest.raises(ValueError, match=message):
    _check(*sizes, **changes)


def test_the_value_model_is_named():
  mesh = mesh_lib.make_mesh(data=1, fsdp=8, tensor=1)
  config = dataclasses.replace(tiny.model().config, hidden_size=12)
  with pytest.raises(ValueError, match='hidden_size=12 of the value model; '):
    functional.Model(config, 'scalar', mesh)
