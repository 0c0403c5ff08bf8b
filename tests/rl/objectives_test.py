import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.rl import bounds
from stppo_jax.rl import objectives


def test_fixed_bounds_are_distances_from_one():
  low, high = bounds.BOUNDS['fixed']((), None, clip_low=0.2, clip_high=0.25)
  assert (low, high) == (0.8, 1.25)


def test_every_table_entry_has_its_sums():
  assert bounds.BOUNDS.keys() == bounds.BOUNDS_SUMS.keys()


#                  below  inside  above, for A > 0 and then A < 0
RATIO = np.array([[0.5, 1.1, 1.5, 0.5, 1.1, 1.5]])
ADVANTAGES = np.array([[2.0, 2.0, 2.0, -2.0, -2.0, -2.0]])
CUT = np.array([[False, False, True, True, False, False]])


def _pessimistic(ratio, advantages):
  return objectives.OBJECTIVES['pessimistic'](ratio, None, advantages, 0.8, 1.2)


def test_pessimistic_by_hand():
  term, cut = _pessimistic(RATIO, ADVANTAGES)
  np.testing.assert_allclose(term, [[-1.0, -2.2, -2.4, 1.6, 2.2, 3.0]])
  np.testing.assert_array_equal(cut, CUT)


def test_pessimistic_is_the_maximum_of_both_products():
  rng = np.random.default_rng(0)
  ratio = np.exp(rng.normal(size=(3, 50)))
  advantages = rng.normal(size=(3, 50))
  term, _ = jax.jit(_pessimistic)(ratio, advantages)
  clipped = np.clip(ratio, 0.8, 1.2)
  expected = np.maximum(-advantages * ratio, -advantages * clipped)
  np.testing.assert_allclose(term, expected, rtol=1e-14)


def test_gradient_is_cut_exactly_where_it_says_so():
  gradient = jax.grad(lambda r: jnp.sum(_pessimistic(r, ADVANTAGES)[0]))(RATIO)
  np.testing.assert_array_equal(gradient, np.where(CUT, 0, -ADVANTAGES))


def test_a_ratio_on_the_bound_keeps_its_whole_gradient():
  ratio = np.array([[0.8, 1.2]])
  advantages = np.array([[-1.0, 1.0]])
  gradient = jax.grad(lambda r: jnp.sum(_pessimistic(r, advantages)[0]))(ratio)
  np.testing.assert_array_equal(gradient, -advantages)


def test_zero_advantage_is_never_cut():
  term, cut = _pessimistic(RATIO, np.zeros_like(RATIO))
  assert not np.any(cut) and not np.any(term)
