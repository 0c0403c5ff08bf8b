"""Rematerialisation changes memory, never the gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.configs import schema
from stppo_jax.models import transformer
from tests.models import tiny

# Long enough for the logits of attention to count.
_TOKENS_BL = np.arange(2 * 64).reshape(2, 64) % 11


def _loss(model, params):
  logprobs_BL, entropy_BL = model.logprobs_and_entropy(
    params, _TOKENS_BL, temperature=1.3
  )
  return jnp.mean(logprobs_BL + 0.1 * entropy_BL)


def _kept(name):
  """Returns the bytes kept between the forward and the backward pass."""
  model = tiny.model(remat=name)
  linear = lambda params: jax.vjp(functools.partial(_loss, model), params)[1]
  return sum(
    leaf.size * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(jax.eval_shape(linear, tiny.params(model)))
  )


@functools.cache
def _gradient(name, unrolled=1):
  model = tiny.model(remat=name, scan_unroll=unrolled)
  return jax.jit(jax.grad(functools.partial(_loss, model)))(tiny.params(model))


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'unrolled'), [('dots', 1), ('all_dots', 1), ('full', 1), ('full', 2)]
)
def test_gradients_do_not_depend_on_policy_and_unrolling(name, unrolled):
  plain = _gradient('none')
  assert all(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(plain))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
    _gradient(name, unrolled),
    plain,
  )


def test_every_policy_saves_less_than_the_one_before():
  kept = [_kept(name) for name in transformer.POLICIES]
  assert kept == sorted(set(kept), reverse=True)


def test_config_rules_list_the_policies():
  rule = schema.KEYS['updates.remat'].rule
  assert rule.allowed == 'one of ' + ', '.join(transformer.POLICIES)
