"""Adapters: fresh, trained and merged ones, and the layers they belong to."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import lora
from tests.models import tiny

_TOKENS = np.array([[1, 5, 2, 7], [3, 3, 9, 0]], np.int32)
_LORA = lora.Lora(rank=3, alpha=6.0, targets='layers/(q|o|down)_proj$')
_ADAPTED = ['layers/down_proj', 'layers/o_proj', 'layers/q_proj']


def _model(head='vocabulary', options=_LORA):
  return dataclasses.replace(tiny.model(head), lora=options)


def _names(tree):
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf.shape
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def test_fresh_adapters_compute_the_same_bits_as_the_base():
  model = _model()
  adapters = jax.device_get(jax.jit(model.init_adapters)(jax.random.key(0)))
  assert _names(adapters) == {
    f'{layer}/lora_{part}': {'a': (2, width, 3), 'b': (2, 3, 16)}[part]
    for layer, width in zip(_ADAPTED, (24, 16, 16))
    for part in 'ab'
  }
  a = adapters['layers']['down_proj']['lora_a']
  assert 0.8 < np.abs(a).max() * np.sqrt(24) <= 1
  assert not np.array_equal(a[0], a[1])
  base = tiny.params(model)
  np.testing.assert_array_equal(
    tiny.hidden(model)(model.join_params(base, adapters), _TOKENS),
    tiny.hidden(model.plain_policy)(base, _TOKENS),
  )


def test_the_product_is_scaled_by_alpha_over_rank():
  model = _model()
  base, adapters = tiny.params(model), tiny.adapters(model)
  params = model.join_params(base, adapters)
  by_hand = jax.tree.map(np.copy, base)
  for name in _ADAPTED:
    _, layer = name.split('/')
    pair = adapters['layers'][layer]
    for n in range(2):
      by_hand['layers'][layer]['kernel'][n] += (
        2.0 * pair['lora_a'][n] @ pair['lora_b'][n]
      )
  merged = jax.jit(model.merge_adapters)(params)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), merged, by_hand
  )
  with_adapters = np.asarray(tiny.hidden(model)(params, _TOKENS))
  without = tiny.hidden(model.plain_policy)
  np.testing.assert_allclose(with_adapters, without(merged, _TOKENS), atol=1e-5)
  assert np.abs(with_adapters - without(base, _TOKENS)).max() > 0.1


def test_the_backward_pass_forms_no_gradient_of_the_base():
  """Counts two of the three products that training W takes: X W and dX."""
  # XLA counts the body of a loop once, so there is one layer.
  shape = dict(hidden_size=64, intermediate_size=256, head_dim=32, num_layers=1)
  plain = tiny.model(**shape)
  options = lora.Lora(rank=1, alpha=1.0, targets='proj')
  model = dataclasses.replace(plain, lora=options)
  base = tiny.params(plain)
  tokens = np.zeros((4, 16), np.int32)

  def flops(loss, params):
    lowered = jax.jit(jax.grad(loss)).lower(params)
    return lowered.cost_analysis()['flops']  # before the compiler: quick

  of_all = flops(lambda p: jnp.sum(plain.hidden(p, tokens)), base)
  of_adapters = flops(
    lambda p: jnp.sum(model.hidden(model.join_params(base, p), tokens)),
    jax.eval_shape(model.init_adapters, jax.random.key(0)),
  )
  assert 0.6 < of_adapters / of_all < 0.75


def test_a_value_model_takes_the_backbone_of_a_policy():
  policy, value = _model(), _model('scalar')
  base = tiny.params(policy)
  trained = tiny.adapters(value) | {'scalar_head': np.ones((16, 1))}
  params = value.join_params(base, trained)
  assert 'lm_head' in base and 'lm_head' not in params
  values_BL = np.asarray(jax.jit(value.values)(params, _TOKENS)[0])
  assert values_BL.shape == _TOKENS.shape and np.any(values_BL)


def test_one_pass_of_both_heads_equals_two_models():
  both = tiny.model('both')
  params = tiny.params(both)
  assert {'lm_head', 'scalar_head'} <= params.keys()
  logprobs_BL, entropy_BL, (values_BL, _), _ = jax.jit(
    lambda p: both.token_outputs(p, _TOKENS, temperature=0.7)
  )(params)
  expected = jax.jit(
    lambda p: both.plain_policy.logprobs_and_entropy(
      p, _TOKENS, temperature=0.7
    )
  )(both.merge_adapters(params))
  for found, wanted in zip((logprobs_BL, entropy_BL), expected):
    np.testing.assert_array_equal(found, wanted)
  backbone = {name: x for name, x in params.items() if name != 'lm_head'}
  values, _ = jax.jit(tiny.model('scalar').values)(backbone, _TOKENS)
  np.testing.assert_array_equal(values_BL, values)
  assert np.any(np.asarray(values))


def test_a_rounded_base_does_not_round_adapters_away():
  kernel = np.ones((1, 2, 2), jnp.bfloat16)
  pair = {'lora_a': np.full((1, 2, 1), 1e-3), 'lora_b': np.ones((1, 1, 2))}
  pair = {name: x.astype(np.float32) for name, x in pair.items()}
  options = lora.Lora(rank=1, alpha=1.0, targets='q')
  merge = jax.jit(functools.partial(lora.merge, options))
  merged = merge({'q': {'kernel': kernel, **pair}})
  np.testing.assert_allclose(merged['q']['kernel'], 1.001, rtol=1e-6)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'targets': 'query'}, "'query'.* layers/down_proj, .* layers/q_proj"),
    ({'alpha_pattern': ('k_p=8',)}, f"'k_p=8'.* {', '.join(_ADAPTED)}$"),
  ],
)
def test_what_matches_no_layer_is_refused_with_the_choices(changes, message):
  model = _model(options=dataclasses.replace(_LORA, **changes))
  with pytest.raises(ValueError, match=message):
    model.init_adapters(jax.random.key(0))
