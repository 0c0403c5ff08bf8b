"""Updates of adapters and of a shared backbone, against whole weights."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import optax
import pytest

from stppo_jax.learner import model_roles
from stppo_jax.learner import state as state_lib
from stppo_jax.models import lora
from stppo_jax.training import components
from stppo_jax.training import model_files
from tests.learner import trees
from tests.learner import updates
from tests.models import tiny
from tests.rl import batches
from tests.training import runs

_LORA = lora.Lora(rank=2, alpha=3.0, targets='(q|o|up)_proj')
_COEFFICIENT = 0.3
_HYPERPARAMETERS = updates.hyperparameters(value=_COEFFICIENT)


def _model_state(params):
  return state_lib.ModelState(params, optax.EmptyState(), np.int32(0))


@pytest.mark.parametrize(
  ('norm', 'cut'),
  [
    ('coefficient', {}),
    pytest.param('gradient', updates.MANY, marks=pytest.mark.slow),
  ],
)
def test_a_shared_backbone_learns_the_sum_of_two_gradients(norm, cut):
  """Compares with a policy and a value model whose backbones are equal.

  The correction of the policy's gradient does not reach the value loss.
  """
  models = updates.sums()
  algorithm = batches.algorithm(
    'st_ppo', correction__clipping_bias__norm=norm, **updates.BIAS
  )
  batch = updates.batch(models)
  state = updates.train_state(models)
  head = state.value.params['scalar_head']
  backbone = {'embedding': state.policy.params['embedding']}
  apart = dataclasses.replace(
    state, value=_model_state(backbone | {'scalar_head': head})
  )
  expected = updates.update(algorithm, batch, models, state=apart)
  policy_gradient, value_gradient = (
    trees.subtract(old.params, new.params)
    for old, new in (
      (apart.policy, expected.state.policy),
      (apart.value, expected.state.value),
    )
  )
  scaled = jax.tree.map(lambda g: _COEFFICIENT * g, value_gradient)
  assert min(trees.norm(policy_gradient), trees.norm(scaled)) > 1e-3
  if norm == 'gradient':
    assert expected.metrics['stab/bias_grad_norm'] > 0.02
  else:
    assert expected.metrics['stab/scale'] != 1

  shared = updates.Models(dataclasses.replace(models.policy, head='both'), None)
  params = state.policy.params | {'scalar_head': head}
  found = updates.update(
    algorithm,
    batch,
    shared,
    state=state_lib.TrainState(_model_state(params), None),
    hyperparameters=_HYPERPARAMETERS,
    **cut,
  )
  assert found.state.value is None
  gradient = trees.subtract(params, found.state.policy.params)
  trees.assert_close(
    gradient,
    {
      'embedding': policy_gradient['embedding'] + scaled['embedding'],
      'lm_head': policy_gradient['lm_head'],
      'scalar_head': scaled['scalar_head'],
    },
  )
  for name, value in expected.metrics.items():
    if not name.endswith(('grad_norm', 'lr')):
      np.testing.assert_allclose(
        found.metrics[name], value, 1e-5, 1e-6, err_msg=name
      )


def _with_adapters(models):
  """Returns models with adapters, their state and its frozen base."""
  adapted = updates.Models(
    *(dataclasses.replace(model, lora=_LORA) for model in models[:2])
  )
  rng = np.random.default_rng(4)
  frozen = updates.train_state(models).policy.params

  def trained(model):
    shapes = jax.eval_shape(model.init_adapters, jax.random.key(0))
    if model.head == 'scalar':
      shapes = shapes | {'scalar_head': np.zeros((16, 1))}
    return jax.tree.map(
      lambda s: (0.3 * rng.normal(size=s.shape)).astype(np.float32), shapes
    )

  state = state_lib.TrainState(*(_model_state(trained(m)) for m in adapted[:2]))
  return adapted, state, frozen


def _merged(adapted, state, frozen):
  """Returns the state of models without adapters that compute the same."""
  merge = jax.jit(functools.partial(lora.merge, _LORA))
  return jax.device_get(
    state_lib.TrainState(
      *(
        _model_state(merge(model.join_params(frozen, trained.params)))
        for model, trained in zip(adapted, (state.policy, state.value))
      )
    )
  )


def _adapter_gradient(pair, kernel_gradient):
  """Returns the gradients of A and B in W + s A B, by the chain rule."""
  gradient, scale = kernel_gradient, _LORA.alpha / _LORA.rank
  return {
    'lora_a': scale * np.einsum('nio,nro->nir', gradient, pair['lora_b']),
    'lora_b': scale * np.einsum('nir,nio->nro', pair['lora_a'], gradient),
  }


@pytest.mark.slow
def test_adapters_get_the_gradient_of_the_merged_weights():
  models, algorithm = updates.transformers(), batches.algorithm('st_ppo')
  adapted, state, frozen = _with_adapters(models)
  whole = _merged(adapted, state, frozen)
  batch = updates.batch(models)
  expected = updates.update(algorithm, batch, models, state=whole)
  found = updates.update(
    algorithm, batch, adapted, state=state, frozen=frozen, **updates.MANY
  )
  for name in ('policy', 'value'):
    old, new = getattr(whole, name), getattr(expected.state, name)
    of_all = trees.subtract(old.params, new.params)
    before = getattr(state, name).params
    after = getattr(found.state, name).params
    wanted = {
      'layers': {
        layer: _adapter_gradient(pair, of_all['layers'][layer]['kernel'])
        for layer, pair in before['layers'].items()
      }
    }
    if name == 'value':
      wanted['scalar_head'] = of_all['scalar_head']
    gradient = trees.subtract(before, after)
    assert wanted['layers'].keys() == {'q_proj', 'o_proj', 'up_proj'}
    assert trees.norm(wanted) > 1e-2
    trees.assert_close(gradient, wanted, atol=1e-5)


@functools.cache
def _jitted(models):
  return jax.jit(updates.annotate(models))


def _annotate(models, state):
  batch = updates.batch(updates.sums())
  algorithm = batches.algorithm('st_ppo')
  return jax.device_get(_jitted(models)(state, batch, algorithm))


def test_the_frozen_base_is_the_reference():
  adapted, state, frozen = _with_adapters(updates.transformers())
  state = dataclasses.replace(state, frozen=frozen)
  found, metrics = _annotate(adapted, state)
  # Where B is zero, the policy is its base, to the last bit.
  params = jax.tree_util.tree_map_with_path(
    lambda path, x: 0 * x if path[-1].key == 'lora_b' else x,
    state.policy.params,
  )
  fresh = dataclasses.replace(state, policy=_model_state(params))
  base, no_metrics = _annotate(adapted, fresh)
  for x_BL in (found.ref_logprobs_BL, base.ref_logprobs_BL):
    np.testing.assert_array_equal(x_BL, base.old_logprobs_BL)
  assert metrics['critic/kl'] != 0 and no_metrics['critic/kl'] == 0


def _flops(models):
  """Returns the FLOPs of annotating and of an update."""
  state, batch = updates.train_state(models), updates.batch(updates.sums())
  reference = dict(state.policy.params)
  reference.pop('scalar_head', None)
  algorithm = batches.algorithm('st_ppo')
  programs = (
    _jitted(models).lower(state, batch, algorithm, reference=reference),
    updates.compiled(models).lower(
      state, {}, batch, updates.with_algorithm(_HYPERPARAMETERS, algorithm)
    ),
  )
  return [program.cost_analysis()['flops'] for program in programs]


@pytest.mark.slow
def test_a_shared_backbone_costs_10_n_instead_of_18_n():
  """Counts old, reference and values, and three passes a trained model."""
  # Unrolled, because XLA counts the body of a loop once.
  shape = dict(
    hidden_size=128, intermediate_size=512, head_dim=64, scan_unroll=2
  )
  own = updates.transformers(**shape)
  shared = updates.Models(tiny.model('both', **shape), None)
  (annotate, update), (annotate_shared, update_shared) = (
    _flops(own),
    _flops(shared),
  )
  np.testing.assert_allclose(annotate_shared / annotate, 4 / 6, rtol=0.03)
  np.testing.assert_allclose(update_shared / update, 6 / 12, rtol=0.03)
  ratio = (annotate_shared + update_shared) / (annotate + update)
  np.testing.assert_allclose(ratio, 10 / 18, rtol=0.03)


@pytest.mark.parametrize('rank', [0, 2])
@pytest.mark.parametrize(
  ('backbone', 'uses_values', 'heads'),
  [
    ('own', True, ['vocabulary', 'scalar']),
    ('own', False, ['vocabulary', None]),
    ('shared', True, ['both', None]),
  ],
)
def test_which_models_a_run_trains(backbone, uses_values, heads, rank):
  config = runs.config(model__value_backbone=backbone, model__lora__rank=rank)
  shape = tiny.model().config
  models = model_roles.build(config, shape, None, uses_values=uses_values)
  assert [m and m.head for m in models[:2]] == heads
  for model in models[:2]:
    assert model is None or (model.lora is None) == (rank == 0)


def test_positions_of_a_value_model_are_scaled_for_the_longest_dialogue(
  tmp_path,
):
  quickstart = runs.REPO / 'assets' / 'quickstart'
  content = json.loads((quickstart / 'config.json').read_text('utf-8'))
  content |= {'max_position_embeddings': 64}
  content['rope_scaling'] = {'rope_type': 'dynamic', 'factor': 2.0}
  (tmp_path / 'config.json').write_text(json.dumps(content), encoding='utf-8')
  config = runs.config(model__value_path=tmp_path)
  mesh = components.build_mesh(config)
  models = model_roles.build(config, runs.shape(config), mesh, uses_values=True)
  assert models.value.config.rope_scaling.length == config.env.max_length
  # It has not seen so many positions.
  shutil.copy(quickstart / 'model.safetensors', tmp_path)
  with pytest.raises(ValueError, match='env.max_length=128: .* at most 64'):
    model_files.check(config, model_files.build_tokenizer(config, None))
