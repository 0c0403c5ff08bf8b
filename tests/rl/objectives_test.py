import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.rl import objectives

#                  below  inside  above, for A > 0 and then A < 0
RATIO = np.array([[0.5, 1.1, 1.5, 0.5, 1.1, 1.5]])
ADVANTAGES = np.array([[2.0, 2.0, 2.0, -2.0, -2.0, -2.0]])
CUT = np.array([[False, False, True, True, False, False]])


def _pessimistic(ratio, advantages):
  return objectives.OBJECTIVES['pessimistic'].function(
    ratio, None, advantages, 0.8, 1.2
  )


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


LOGPROBS = np.array([[-1.0, -2.0, -3.0, -1.0, -2.0, -3.0]])


def _of(name, **options):
  def run(ratio, logprobs):
    return objectives.OBJECTIVES[name].function(
      ratio, logprobs, ADVANTAGES, 0.8, 1.2, **options
    )

  return run


@pytest.mark.parametrize(
  'name,options,term,cut',
  [
    # Only the last, A < 0 far above, is held back by c.
    (
      'dual_clip',
      {'c': 1.4},
      [-1.0, -2.2, -2.4, 1.6, 2.2, 2.8],
      [0, 0, 1, 1, 0, 1],
    ),
    # -clip(r) A log pi
    ('detached', {}, [1.6, 4.4, 7.2, -1.6, -4.4, -7.2], [0] * 6),
    # -r A log pi where it is not harmful
    ('masked', {}, [1.0, 4.4, 0, 0, -4.4, -9.0], CUT[0]),
    ('unclipped', {}, [1.0, 4.4, 9.0, -1.0, -4.4, -9.0], [0] * 6),
  ],
)
def test_the_others_by_hand(name, options, term, cut):
  run = _of(name, **options)
  np.testing.assert_allclose(run(RATIO, LOGPROBS)[0], [term], rtol=1e-14)
  np.testing.assert_array_equal(run(RATIO, LOGPROBS)[1], [cut])
  # All have the gradient of the surrogate where it is not cut, if the ratio
  # moves with log pi; only `detached` has another weight.
  total = lambda x: jnp.sum(run(RATIO * jnp.exp(x - LOGPROBS), x)[0])
  weight = np.clip(RATIO, 0.8, 1.2) if name == 'detached' else RATIO
  expected = np.where(np.asarray([cut], bool), 0, -ADVANTAGES * weight)
  np.testing.assert_allclose(
    jax.grad(total)(LOGPROBS), expected, rtol=1e-14, atol=1e-15
  )
