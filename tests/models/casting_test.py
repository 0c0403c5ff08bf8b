"""Weights that are cast once give the numbers of weights cast at each use."""

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.models import modules
from tests.models import tiny


def test_weights_cast_before_give_the_same_numbers():
  model = tiny.model(dtype='bfloat16')
  params = tiny.params(model)
  tokens_BL = np.arange(12).reshape(2, 6) % 11
  compute = jax.jit(
    lambda params: model.logprobs_and_entropy(
      params, tokens_BL, temperature=1.0
    )
  )
  cast = modules.cast(params, 'bfloat16')
  assert {x.dtype for x in jax.tree.leaves(cast)} == {jnp.dtype('bfloat16')}
  jax.tree.map(np.testing.assert_array_equal, compute(cast), compute(params))


def test_routers_stay_float32():
  leaf = np.full((2, 3), 1 / 3, np.float32)
  params = {'layers': {'mlp': {'router': {'kernel': leaf}, 'gate_proj': leaf}}}
  cast = modules.cast(params, 'bfloat16')['layers']['mlp']
  assert cast['router']['kernel'] is leaf
  assert cast['gate_proj'].dtype == jnp.bfloat16
  same = modules.cast(params, 'float32')
  jax.tree.map(np.testing.assert_array_equal, same, params)


def test_cast_and_delete_frees_the_given_weights():
  leaf = np.full((2, 3), 1 / 3, np.float32)
  params = jax.device_put({'router': {'kernel': leaf}, 'norm': leaf})
  cast = modules.cast_and_delete(params, 'bfloat16')
  assert cast['router']['kernel'] is params['router']['kernel']
  expected = modules.cast({'norm': leaf}, 'bfloat16')['norm']
  np.testing.assert_array_equal(cast['norm'], expected)
  assert cast['norm'].dtype == jnp.bfloat16 and params['norm'].is_deleted()
  assert modules.cast_and_delete(cast, 'bfloat16')['norm'] is cast['norm']
