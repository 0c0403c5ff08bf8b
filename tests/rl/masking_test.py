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
  functions = masking.masked_mean, masking.masked_moments, masking.whiten
  run = jax.jit(lambda mask: tuple(f(X, mask) for f in functions))
  for mask, mean in ((empty, 0), (single, 2)):
    expected = mean, (mean, 0), np.zeros_like(X)
    jax.tree.map(np.testing.assert_array_equal, run(mask), expected)


@jax.jit
def _values_and_gradients(x):
  functions = (
    masking.masked_mean,
    lambda x, m: masking.masked_moments(x, m)[1],
    lambda x, m: jnp.sum(masking.whiten(x, m) ** 3),
  )
  return [jax.value_and_grad(function)(x, MASK) for function in functions]


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_poison_reaches_neither_value_nor_gradient(value):
  clean = _values_and_gradients(X)
  poisoned = _values_and_gradients(batches.poison_array(X, MASK, value))
  jax.tree.map(np.testing.assert_array_equal, poisoned, clean)
  for total, gradient in poisoned:
    assert np.isfinite(total)
    assert np.all(np.asarray(gradient)[~MASK] == 0)
