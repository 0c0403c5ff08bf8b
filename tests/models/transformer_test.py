"""The decoder under padding and rematerialised: twins."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.models import tiny

_B, _L = 3, 14


def _tokens(seed=0, shape=(_B, _L)):
  return np.random.default_rng(seed).integers(0, 11, shape).astype(np.int32)


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
