import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.rl import masking
from tests.rl import batches

X = np.array([[1.0, 2.0, 9.0], [9.0, 6.0, 9.0]])
MASK = np.array([[True, True, False], [False, True, False]])


def test_empty_and_single_masks_give_zero():
  empty = np.zeros_like(MASK)
  single = np.array([[False, True, False], [False, False, False]])
  assert masking.masked_mean(X, empty) == 0
  assert masking.masked_moments(X, empty) == (0, 0)
  assert masking.masked_moments(X, single) == (2.0, 0)
  np.testing.assert_array_equal(masking.whiten(X, empty), np.zeros_like(X))
  np.testing.assert_array_equal(masking.whiten(X, single), np.zeros_like(X))


@pytest.mark.parametrize('value', [np.nan, np.inf])
@pytest.mark.parametrize(
  'function',
  [
    masking.masked_mean,
    lambda x, m: masking.masked_moments(x, m)[1],
    lambda x, m: jnp.sum(masking.whiten(x, m) ** 3),
  ],
)
def test_poison_reaches_neither_value_nor_gradient(function, value):
  clean = jax.value_and_grad(function)(jnp.asarray(X), MASK)
  poisoned = jax.value_and_grad(function)(
    batches.poison_array(X, MASK, value), MASK
  )
  np.testing.assert_array_equal(poisoned[0], clean[0])
  np.testing.assert_array_equal(poisoned[1], clean[1])
  assert np.isfinite(poisoned[0])
  assert np.all(poisoned[1][~MASK] == 0)
