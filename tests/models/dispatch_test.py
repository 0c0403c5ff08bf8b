"""Experts on different devices against experts of one device.

B rows, L tokens, X experts, E experts that a token visits, F width of one.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import lora
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from tests.models import tiny

B, L, X, E, F = 8, 6, 8, 3, 8
_SHAPE = tiny.MIXTURE | dict(
  vocab_size=12, num_experts=X, num_experts_per_tok=E, moe_intermediate_size=F
)
TOKENS = np.random.default_rng(0).integers(0, 11, (B, L)).astype(np.int32)
# The experts that tokens visit in each layer: those of the routers, or the same
# of all tokens, all of them on one device.
_SKEWED = np.broadcast_to(np.arange(E), (B, L, 2, E))


def _gradient(mesh=None, *, expert_ids=None, options=None, **changes):
  """Returns the loss of a whole model and its gradient."""
  model = tiny.model(**(_SHAPE | changes))
  model = dataclasses.replace(model, mesh=mesh, lora=options)
  params = tiny.params(dataclasses.replace(model, mesh=None, lora=None))
  if options is not None:
    params = model.join_params(params, tiny.adapters(model))

  if mesh is not None:
    params = jax.device_put(params, sharding.param_shardings(params, mesh))

  def loss(params):
    outputs = model.token_outputs(
      params, TOKENS, temperature=1.0, expert_ids=expert_ids
    )
    routing = outputs.routing
    balance = jnp.mean(routing.probs_BX * routing.visits_BX)
    return balance - jnp.mean(outputs.logprobs_BL)

  return jax.jit(jax.value_and_grad(loss))(params)


def _assert_close(found, expected):
  def close(a, b):
    assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)
    assert np.linalg.norm(b) > 0

  jax.tree.map(close, found, expected)


# Data, fsdp, expert and tensor.
@pytest.mark.parametrize(
  ('axes', 'skewed'),
  [
    ((2, 1, 4, 1), True),  # a device computes three blocks, the others none
    ((1, 2, 2, 2), False),
    *(
      (axes, skewed)
      for axes in ((1, 1, 8, 1), (1, 4, 2, 1), (2, 1, 2, 2))
      for skewed in (False, True)
    ),
  ],
)
@pytest.mark.slow
def test_loss_and_gradients_are_those_of_one_device(axes, skewed):
  ids = _SKEWED if skewed else None
  expected = _gradient(moe='dense', expert_ids=ids)
  mesh = mesh_lib.make_mesh(**dict(zip(mesh_lib.AXES, axes)))
  found = _gradient(mesh, moe='grouped', remat='full', expert_ids=ids)
  _assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['dense', 'grouped'])
def test_adapters_of_experts_are_those_of_one_device(kind):
  options = lora.Lora(rank=2, alpha=3.0, targets='moe/')
  expected = _gradient(moe='dense', options=options)
  mesh = mesh_lib.make_mesh(data=1, fsdp=2, expert=2, tensor=2)
  layout = sharding.param_shardings(expected[1], mesh)
  spec = layout['layers']['moe']['down_proj']['lora_a'].spec
  assert tuple(spec) == (None, 'expert', 'tensor')
  _assert_close(_gradient(mesh, moe=kind, options=options), expected)
