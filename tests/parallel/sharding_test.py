"""Parameters and the states of optimisers have a sharding."""

import jax
from jax.sharding import PartitionSpec as P
import optax
import pytest

from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from tests.models import tiny

# All sizes are divisible by two.
_EVEN = {'vocab_size': 12, 'num_kv_heads': 2}


def _mesh():
  return mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)


def _shapes(head='vocabulary', **changes):
  model = tiny.model(head, **(_EVEN | changes))
  return jax.eval_shape(model.init, jax.random.key(0))


def _specs(shapes, mesh=None):
  layout = sharding.param_shardings(shapes, mesh or _mesh())
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf.spec
    for path, leaf in jax.tree_util.tree_leaves_with_path(layout)
  }


def test_every_parameter_of_a_policy_has_a_sharding():
  into, out_of = P(None, 'fsdp', 'tensor'), P(None, 'tensor', 'fsdp')
  specs = _specs(_shapes('both'))
  assert specs['embedding'] == specs['lm_head'] == P('tensor', 'fsdp')
  assert specs['layers/q_proj/bias'] == P(None, 'tensor')
  assert specs['layers/mlp_norm/scale'] == specs['norm/scale'] == P()
  assert specs['scalar_head'] == P('fsdp')
  for name in ('q_proj', 'k_proj', 'v_proj', 'gate_proj', 'up_proj'):
    assert specs[f'layers/{name}/kernel'] == into
  for name in ('o_proj', 'down_proj'):
    assert specs[f'layers/{name}/kernel'] == out_of


def test_a_name_without_a_rule_is_printed():
  shapes = _shapes()
  shapes['layers']['router'] = {'kernel': shapes['embedding']}
  with pytest.raises(ValueError, match="parameter 'layers/router/kernel'"):
    sharding.param_shardings(shapes, _mesh())


def test_dimensions_that_do_not_divide_are_replicated():
  policy = _specs(_shapes(vocab_size=11, num_kv_heads=1, head_dim=6))
  assert policy['embedding'] == P(None, 'fsdp')  # 11 rows
  mesh = mesh_lib.make_mesh(data=1, fsdp=2, tensor=4)
  policy = _specs(_shapes(num_kv_heads=1, head_dim=6), mesh)
  assert policy['layers/k_proj/kernel'] == P(None, 'fsdp', None)  # 6 columns
  assert policy['layers/k_proj/bias'] == P(None, None)
  assert policy['layers/q_proj/kernel'] == P(None, 'fsdp', 'tensor')


@pytest.mark.parametrize('head', ['vocabulary', 'scalar'])
def test_moments_are_sharded_like_their_parameters(head):
  params = _shapes(head)
  state = jax.eval_shape(optax.adamw(1e-3).init, params)
  layout = sharding.param_shardings({'state': state, 'params': params}, _mesh())
  adam = layout['state'][0]
  assert adam.mu == adam.nu == layout['params']
  assert adam.count.is_fully_replicated
