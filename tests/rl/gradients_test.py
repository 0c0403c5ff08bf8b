"""From gradients of the parts to the one of the update."""

import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.rl import gradients
from tests.rl import batches


def _by_gradient(floor=1.0):
  return batches.algorithm(
    's_ppo',
    correction__clipping_bias__norm='gradient',
    correction__clipping_bias__floor=floor,
  )


@pytest.mark.parametrize('name', ['token_ppo', 'turn_ppo', 's_ppo', 'st_ppo'])
def test_other_rows_take_one_pull_back_of_the_sum(name):
  algorithm = batches.algorithm(name)
  assert gradients.pull_backs(algorithm) == {'loss': {'policy', 'other'}}
  whole = {'w': jnp.array([1.0, -2.0])}
  gradient, metrics = gradients.combine(algorithm, {'loss': whole})
  np.testing.assert_array_equal(gradient['w'], whole['w'])
  assert metrics == {'stab/bias_grad_norm': 0}


def test_a_norm_that_is_not_selected_divides_nothing():
  algorithm = batches.algorithm(
    'token_ppo', correction__clipping_bias__norm='gradient'
  )
  assert gradients.pull_backs(algorithm).keys() == {'loss'}


def test_every_part_is_pulled_back_once_on_its_own():
  wanted = gradients.pull_backs(_by_gradient())
  assert wanted == {
    'policy': {'policy'},
    'bias': {'bias'},
    'other': {'other'},
  }


@pytest.mark.parametrize(('floor', 'divisor'), [(1.0, 13.0), (26.0, 26.0)])
def test_the_policy_alone_is_divided_by_the_norm_of_the_bias(floor, divisor):
  # |(3, 4), 12| = 13, over all leaves together.
  parts = {
    'policy': {'a': jnp.array([1.0, 2.0]), 'b': jnp.array(-26.0)},
    'bias': {'a': jnp.array([3.0, 4.0]), 'b': jnp.array(12.0)},
    'other': {'a': jnp.array([10.0, 0.0]), 'b': jnp.array(5.0)},
  }
  gradient, metrics = gradients.combine(_by_gradient(floor), parts)
  np.testing.assert_allclose(gradient['a'], [10 + 1 / divisor, 2 / divisor])
  np.testing.assert_allclose(gradient['b'], 5 - 26 / divisor)
  assert metrics['stab/bias_grad_norm'] == 13
