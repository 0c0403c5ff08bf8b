"""A fresh state lies where its layout says, and starts from the policy."""

import functools

import jax
import numpy as np
import optax

from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from stppo_jax.training import state as state_lib
from tests.models import tiny


def test_a_fresh_state_is_sharded_with_its_moments():
  policy, value = tiny.model(vocab_size=12), tiny.model('scalar', vocab_size=12)
  weights = tiny.params(policy)
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
  adam = optax.scale_by_adam()
  make = functools.partial(
    state_lib.fresh,
    lambda: jax.tree.map(jax.numpy.asarray, weights),
    lambda made: state_lib.value_from_policy(value, jax.random.key(0), made),
    adam,
    adam,
  )
  layout = sharding.param_shardings(jax.eval_shape(make), mesh)
  state = jax.jit(make, out_shardings=layout)()
  jax.tree.map(np.testing.assert_array_equal, state.policy.params, weights)
  for model in (state.policy, state.value):
    assert model.updates == 0 and model.updates.dtype == np.int32

  # The value model: the policy's backbone, its own head, at zero.
  assert state.value.params.keys() == weights.keys() - {'lm_head'} | {
    'scalar_head'
  }
  for name, leaf in state.value.params.items():
    expected = weights.get(name, np.zeros((16, 1)))
    jax.tree.map(np.testing.assert_array_equal, leaf, expected)

  # A moment lies beside its weight: a quarter on each device.
  for model in (state.policy, state.value):
    kernel = model.params['layers']['q_proj']['kernel']
    moment = model.optimizer.mu['layers']['q_proj']['kernel']
    assert kernel.sharding == moment.sharding
    assert 4 * kernel.addressable_shards[0].data.size == kernel.size
    assert model.updates == 0 and model.updates.dtype == np.int32
    assert model.optimizer.count.sharding.is_fully_replicated
