import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.rl import masking
from tests.rl import batches

X = np.array([[1.0, 2.0, 9.0], [9.0, 6.0, 9.0]])
FUNCTIONS = masking.masked_mean, masking.masked_moments, masking.whiten


def test_empty_and_single_masks_give_zero():
  single = np.array([[False, True, False], [False, False, False]])
  empty = np.zeros_like(single)
  run = jax.jit(lambda mask: tuple(f(X, mask) for f in FUNCTIONS))
  for mask, mean in ((empty, 0), (single, 2)):
    expected = mean, (mean, 0), np.zeros_like(X)
    jax.tree.map(np.testing.assert_array_equal, run(mask), expected)


def test_poison_reaches_neither_value_nor_gradient():
  mask = np.array([[True, True, False], [False, True, False]])

  @jax.jit
  @jax.grad
  def gradient(x):
    found = jax.tree.leaves([function(x, mask) for function in FUNCTIONS])
    return sum(jnp.sum(array**3) for array in found)

  clean = gradient(X)
  assert not np.asarray(clean)[~mask].any()
  for value in (np.nan, np.inf):
    poisoned = gradient(batches.poison_array(X, mask, value))
    np.testing.assert_array_equal(poisoned, clean)
