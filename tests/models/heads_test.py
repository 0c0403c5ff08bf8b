"""Values of tokens, on numbers one can check by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import heads

_HIDDEN = np.array([[[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]]], np.float32)
_TOKENS = np.array([[1, 1, 0]], np.int32)
_values = jax.jit(heads.token_values, static_argnames='bounds')


# vocabulary_test.py has log-probabilities and entropies.
@pytest.mark.parametrize('positions_BM', [None, np.array([[2, 3]])])
def test_a_categorical_value_is_the_mean_of_its_bins(positions_BM):
  head_DY = np.array([[0.3, -1.0, 2.0], [1.5, 0.0, -0.4]], np.float32)
  places = [1, 2] if positions_BM is None else [2]
  values = _values(
    # Only the state before token 2 is given; 3 is filler.
    _HIDDEN if positions_BM is None else _HIDDEN[:, 1:],
    head_DY,
    _TOKENS,
    loss_positions_BM=positions_BM,
    bounds=(-2.0, 4.0),
  )
  values_BL, logprobs_BLY = map(np.asarray, values)
  for place in range(3):
    p = np.exp(_HIDDEN[0, place - 1] @ head_DY)
    p = p / p.sum() if place in places else np.ones(3)
    np.testing.assert_allclose(np.exp(logprobs_BLY[0, place]), p, rtol=1e-6)
    wanted = -2 * p[0] + p[1] + 4 * p[2] if place in places else 0
    np.testing.assert_allclose(values_BL[0, place], wanted, atol=1e-6)


def test_values_are_not_rounded_to_the_dtype_of_the_states():
  rng = np.random.default_rng(0)
  hidden_BLD, scalar_D1 = (
    rng.normal(size=shape).astype(jnp.bfloat16)
    for shape in ((2, 9, 64), (64, 1))
  )
  logits = jax.eval_shape(heads.logits, hidden_BLD, scalar_D1.T)
  assert logits.dtype == jnp.float32
  tokens_BL = np.zeros((2, 9), np.int32)

  def total(*arrays):
    values_BL = heads.token_values(*arrays, tokens_BL).values_BL
    return jnp.sum(values_BL), values_BL

  gradients = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))
  gradient, values_BL = jax.tree.map(
    np.asarray, gradients(hidden_BLD, scalar_D1)
  )
  wanted_BL = (
    hidden_BLD[:, :-1].astype(np.float32) @ scalar_D1.astype(np.float32)
  )[..., 0]
  # A value uses the state before its token.
  np.testing.assert_allclose(values_BL[:, 1:], wanted_BL, rtol=1e-5, atol=1e-5)
  assert values_BL.dtype == np.float32 and not np.any(values_BL[:, 0])
  assert [x.dtype for x in gradient] == [jnp.bfloat16] * 2
  np.testing.assert_allclose(
    gradient[1][:, 0].astype(np.float32),
    hidden_BLD[:, :-1].astype(np.float32).sum(axis=(0, 1)),
    rtol=2**-8,
  )
