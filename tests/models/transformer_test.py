"""The decoder from a cache, under padding and rematerialised: twins."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import cache as cache_lib
from tests.models import tiny

_B, _L, _C = 3, 14, 4


def _tokens(seed=0, shape=(_B, _L)):
  return np.random.default_rng(seed).integers(0, 11, shape).astype(np.int32)


@pytest.mark.parametrize('num_kv_heads', [1, 2])
def test_extending_in_random_chunks_equals_the_whole(num_kv_heads):
  model = tiny.model(num_kv_heads=num_kv_heads)
  params, tokens_BL = tiny.params(model), _tokens()
  whole_BLD = np.asarray(tiny.hidden(model)(params, tokens_BL))
  extend = jax.jit(model.extend)
  rng = np.random.default_rng(1)
  for _ in range(3):
    # Poison: what the cache holds past a row's length must not matter.
    cache = jax.tree.map(
      lambda x: jnp.full_like(x, 1e3),
      cache_lib.empty(model.config, _B, _L),
    )
    lengths_B = np.zeros(_B, np.int32)
    seen_counts = set()
    while (lengths_B < _L).any():
      counts_B = np.minimum(rng.integers(0, _C + 1, _B), _L - lengths_B)
      tokens_BC = _tokens(rng.integers(1000), (_B, _C))  # poison too
      for b, (length, count) in enumerate(zip(lengths_B, counts_B)):
        tokens_BC[b, :count] = tokens_BL[b, length : length + count]
      hidden_BCD, cache = extend(
        params, tokens_BC, cache, lengths_B, counts_B.astype(np.int32)
      )
      for b, (length, count) in enumerate(zip(lengths_B, counts_B)):
        np.testing.assert_allclose(
          hidden_BCD[b, :count],
          whole_BLD[b, length : length + count],
          atol=1e-5,
        )
      seen_counts |= set(counts_B.tolist())
      lengths_B = (lengths_B + counts_B).astype(np.int32)
    assert {0, _C} <= seen_counts


def test_nothing_sees_what_follows_it():
  model = tiny.model()
  params, tokens_BL = tiny.params(model), _tokens()
  lengths_B = np.array([5, 9, _L])
  padding_BL = np.arange(_L)[None] >= lengths_B[:, None]
  padded_BL = np.where(padding_BL, _tokens(7), tokens_BL).astype(np.int32)
  whole_BLD, padded_BLD = (
    np.asarray(tiny.hidden(model)(params, x)) for x in (tokens_BL, padded_BL)
  )
  np.testing.assert_array_equal(whole_BLD[~padding_BL], padded_BLD[~padding_BL])
  assert not np.allclose(whole_BLD[padding_BL], padded_BLD[padding_BL])


def test_positions_matter():
  # Without positions, attention is blind to the order of what came before.
  model = tiny.model()
  params, tokens_BL = tiny.params(model), _tokens()
  tokens_BL[0, :2], tokens_BL[1, :2] = (3, 4), (4, 3)
  tokens_BL[1, 2:] = tokens_BL[0, 2:]
  hidden_BLD = tiny.hidden(model)(params, tokens_BL)
  assert np.abs(hidden_BLD[0, -1] - hidden_BLD[1, -1]).max() > 1e-3


def test_how_layers_are_run_does_not_change_the_gradient():
  tokens_BL = _tokens()

  def gradient(**runtime):
    model = tiny.model(**runtime)

    def loss(params):
      logprobs_BL, entropy_BL = model.logprobs_and_entropy(
        params, tokens_BL, temperature=1.3
      )
      return jnp.mean(logprobs_BL + 0.1 * entropy_BL)

    return jax.jit(jax.grad(loss))(tiny.params(model))

  plain, other = gradient(), gradient(remat='full', scan_unroll=2)
  assert all(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(plain))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), plain, other
  )


def test_layers_are_rematerialised_and_unrolled_as_asked():
  tokens_BL = _tokens()

  def program(**runtime):
    model = tiny.model(**runtime)
    return str(jax.make_jaxpr(model.hidden)(tiny.params(model), tokens_BL))

  assert 'remat' not in program() and 'unroll=1' in program()
  assert 'remat' in program(remat='full')
  assert 'unroll=2' in program(scan_unroll=2)
