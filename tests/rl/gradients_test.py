"""A policy gradient divided by the norm of its clipping bias."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.rl import clipping_bias
from tests.rl import batches


@pytest.mark.parametrize(
  ('name', 'norm', 'divides'),
  [
    ('s_ppo', 'gradient', True),
    ('s_ppo', 'coefficient', False),
    ('token_ppo', 'gradient', False),  # the correction is not selected
  ],
)
def test_only_a_selected_gradient_norm_divides(name, norm, divides):
  algorithm = batches.algorithm(name, correction__clipping_bias__norm=norm)
  assert algorithm.divides_by_bias_norm == divides


def test_each_term_has_its_own_gradient():
  def loss_terms(x):
    terms = clipping_bias.LossTerms(
      policy=jnp.sum(x**2), bias=3 * x[0], other=-x[0] * x[1]
    )
    return terms, x + 1

  run = jax.jit(lambda x: clipping_bias.term_gradients(loss_terms, x))
  found, outputs = run(np.array([2.0, 5.0]))
  np.testing.assert_array_equal(found.policy, [4, 10])
  np.testing.assert_array_equal(found.bias, [3, 0])
  np.testing.assert_array_equal(found.other, [-5, -2])
  np.testing.assert_array_equal(outputs, [3, 6])


@pytest.mark.parametrize(('floor', 'divisor'), [(1.0, 13.0), (26.0, 26.0)])
def test_the_policy_alone_is_divided_by_the_norm_of_the_bias(floor, divisor):
  # |(3, 4), 12| = 13, over all leaves together.
  terms = clipping_bias.LossTerms(
    policy={'a': np.array([1.0, 2.0]), 'b': np.array(-26.0)},
    bias={'a': np.array([3.0, 4.0]), 'b': np.array(12.0)},
    other={'a': np.array([10.0, 0.0]), 'b': np.array(5.0)},
  )
  divide = jax.jit(clipping_bias.divide_by_bias_norm)
  gradient, norm = divide(terms, floor=floor)
  np.testing.assert_allclose(gradient['a'], [10 + 1 / divisor, 2 / divisor])
  np.testing.assert_allclose(gradient['b'], 5 - 26 / divisor)
  assert norm == 13
