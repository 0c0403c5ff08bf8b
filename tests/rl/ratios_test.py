import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.rl import ratios
from stppo_jax.rl import segments
from tests.rl import batches
from tests.rl import twins


@functools.partial(
  jax.jit, static_argnames=('level', 'gradient', 'reduce', 'implementation')
)
def _ratio(
  logprobs,
  batch,
  *,
  level,
  gradient='segment',
  reduce='mean',
  implementation='segment_sum',
):
  log_ratio = ratios.token_log_ratio(
    logprobs, batch.old_logprobs_BL, batch.loss_mask_BL
  )
  with batches.summing(implementation):
    return jnp.exp(
      ratios.level_log_ratio(
        log_ratio,
        batch,
        level=level,
        gradient=gradient,
        reduce=reduce,
        num_turns=batches.T,
      )
    )


# The value is the same whatever the gradient: each form has one of both.
@pytest.mark.parametrize(
  ('implementation', 'gradient'),
  [
    pytest.param(
      form,
      gradient,
      marks=()
      if (gradient == 'token') == (form == 'broadcast')
      else pytest.mark.slow,
    )
    for form in segments.IMPLEMENTATIONS
    for gradient in ratios.GRADIENTS
  ],
)
@pytest.mark.parametrize('reduce', ratios.REDUCES)
@pytest.mark.parametrize('level', segments.LEVELS)
def test_ratio_is_the_loop(level, gradient, reduce, implementation):
  batch, logprobs, _ = batches.make()
  actual = _ratio(
    logprobs,
    batch,
    level=level,
    gradient=gradient,
    reduce=reduce,
    implementation=implementation,
  )
  expected = twins.ratios(logprobs, batch.old_logprobs_BL, batch, level, reduce)
  np.testing.assert_allclose(actual, expected, rtol=1e-13)


@pytest.mark.parametrize('level', segments.LEVELS)
def test_token_gradient_stays_with_the_token(level):
  batch, logprobs, _ = batches.make()
  weight = np.where(batch.loss_mask_BL, batch.advantages_BL, 0)
  ratio = _ratio(logprobs, batch, level=level)
  actual = jax.grad(
    lambda x: jnp.sum(weight * _ratio(x, batch, level=level, gradient='token'))
  )(logprobs)
  np.testing.assert_allclose(actual, weight * ratio, rtol=1e-13)


def test_log_ratios_are_limited():
  mask = np.ones((1, 3), bool)
  log_ratio = ratios.token_log_ratio(
    np.array([[50.0, -60.0, 1.0]]), np.zeros((1, 3)), mask
  )
  np.testing.assert_array_equal(log_ratio, [[20.0, -20.0, 1.0]])
  batch, _, _ = batches.make()
  total = ratios.level_log_ratio(
    np.full((1, 3), 19.0),
    batch.replace(loss_mask_BL=mask),
    level='sequence',
    gradient='segment',
    reduce='sum',
    num_turns=1,
  )
  np.testing.assert_array_equal(total, np.full((1, 3), 20.0))
