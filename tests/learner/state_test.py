"""A new state has its layout, and starts from the policy's weights."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from stppo_jax.learner import model_roles
from stppo_jax.learner import state as state_lib
from stppo_jax.models import lora
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from tests.learner import trees
from tests.models import tiny

_LORA = lora.Lora(rank=2, alpha=2.0, targets='(q|o)_proj')


def _init(policy, value):
  """Returns a state on eight devices, and the weights it starts from."""
  weights = tiny.params(policy)
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
  make = functools.partial(
    state_lib.init,
    key=jax.random.key(0),
    models=model_roles.Models(policy, value),
    optimizers=state_lib.Optimizers(
      optax.scale_by_adam(), optax.scale_by_adam()
    ),
  )
  layout = sharding.param_shardings(jax.eval_shape(make, weights), mesh)
  placed = jax.device_put(weights, sharding.param_shardings(weights, mesh))
  made = jax.jit(make, donate_argnums=0, out_shardings=layout)(placed)
  return made, weights


def test_a_new_state_is_sharded_with_its_moments():
  policy, value = tiny.model(vocab_size=12), tiny.model('scalar', vocab_size=12)
  state, weights = _init(policy, value)
  trees.assert_equal(state.policy.params, weights)
  for model in (state.policy, state.value):
    assert model.updates == 0 and model.updates.dtype == np.int32

  # The value model: the policy's backbone, its own head, at zero.
  assert state.value.params.keys() == weights.keys() - {'lm_head'} | {
    'scalar_head'
  }
  for name, leaf in state.value.params.items():
    trees.assert_equal(leaf, weights.get(name, np.zeros((16, 1))))

  # A moment lies beside its weight: a quarter on each device.
  for model in (state.policy, state.value):
    kernel = model.params['layers']['q_proj']['kernel']
    moment = model.optimizer.mu['layers']['q_proj']['kernel']
    assert kernel.sharding == moment.sharding
    assert 4 * kernel.addressable_shards[0].data.size == kernel.size
    assert model.optimizer.count.sharding.is_fully_replicated


def test_under_adapters_there_is_one_base_and_few_moments():
  models = (
    dataclasses.replace(tiny.model(head, vocab_size=12), lora=_LORA)
    for head in ('vocabulary', 'scalar')
  )
  state, weights = _init(*models)
  trees.assert_equal(state.frozen, weights)
  adapters = {
    name: {'lora_a': (2, 16, 2), 'lora_b': (2, 2, 16)}
    for name in ('q_proj', 'o_proj')
  }
  shapes = lambda tree: jax.tree.map(lambda x: x.shape, tree)
  for model, head in (
    (state.policy, {}),
    (state.value, {'scalar_head': (16, 1)}),
  ):
    assert shapes(model.params) == {'layers': adapters} | head
    assert shapes(model.optimizer.mu) == shapes(model.params)
  # The adapters of the two models are drawn separately.
  a, b = (
    m.params['layers']['q_proj']['lora_a'] for m in (state.policy, state.value)
  )
  assert np.abs(a - b).max() > 0.1

  # An adapter is sharded along the side that it shares with its kernel.
  layers = state.policy.params['layers']
  parts = lambda x: x.size // x.addressable_shards[0].data.size
  for name in ('q_proj', 'o_proj'):
    assert parts(layers[name]['lora_a']) == parts(layers[name]['lora_b']) == 2
    kernel = state.frozen['layers'][name]['kernel'].sharding.spec
    assert layers[name]['lora_a'].sharding.spec[1] == kernel[1]
    assert layers[name]['lora_b'].sharding.spec[2] == kernel[2]


@pytest.mark.parametrize('options', [None, _LORA])
def test_a_shared_backbone_is_a_policy_with_a_value_head(options):
  policy = dataclasses.replace(tiny.model('both', vocab_size=12), lora=options)
  plain = tiny.params(policy.plain_policy)
  make = functools.partial(
    state_lib.init,
    key=jax.random.key(0),
    models=model_roles.Models(policy, None),
    optimizers=state_lib.Optimizers(optax.identity(), optax.identity()),
  )
  state = jax.eval_shape(make, plain)
  assert state.value is None
  assert state.policy.params['scalar_head'].shape == (16, 1)
  assert (not state.frozen) == (options is None)
  if options is None:
    assert state.policy.params.keys() == plain.keys() | {'scalar_head'}
