import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.rl import ratios
from stppo_jax.rl import segments
from tests.rl import batches
from tests.rl import twins

_CASES = tuple(itertools.product(segments.LEVELS, ratios.REDUCES))


@functools.partial(jax.jit, static_argnames=('gradient', 'implementation'))
def _ratios(logprobs, batch, *, gradient, implementation):
  """Returns the ratios by level and reduction."""
  log_ratio = ratios.token_log_ratio(
    logprobs, batch.old_logprobs_BL, batch.loss_mask_BL
  )
  with batches.summing(implementation):
    found = [
      ratios.level_log_ratio(
        log_ratio,
        batch,
        level=level,
        gradient=gradient,
        reduce=reduce,
        num_turns=batches.T,
      )
      for level, reduce in _CASES
    ]
  return dict(zip(_CASES, map(jnp.exp, found), strict=True))


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
@pytest.mark.parametrize(('level', 'reduce'), _CASES)
def test_ratio_is_the_loop(level, gradient, reduce, implementation):
  batch, logprobs, _ = batches.make()
  actual = _ratios(
    logprobs, batch, gradient=gradient, implementation=implementation
  )[level, reduce]
  expected = twins.ratios(logprobs, batch.old_logprobs_BL, batch, level, reduce)
  np.testing.assert_allclose(actual, expected, rtol=1e-13)


def test_token_gradient_stays_with_the_token():
  batch, logprobs, _ = batches.make()
  weight = np.where(batch.loss_mask_BL, batch.advantages_BL, 0)
  form = {'implementation': 'segment_sum'}
  ratio = _ratios(logprobs, batch, gradient='segment', **form)

  @jax.jit
  def gradients(logprobs):
    def run(x):
      found = _ratios(x, batch, gradient='token', **form)
      return {level: found[level, 'mean'] for level in segments.LEVELS}

    found, pull = jax.vjp(run, logprobs)
    zeros = jax.tree.map(jnp.zeros_like, found)
    return {level: pull(zeros | {level: weight})[0] for level in found}

  for level, actual in gradients(logprobs).items():
    expected = weight * np.asarray(ratio[level, 'mean'])
    np.testing.assert_allclose(actual, expected, rtol=1e-13, err_msg=level)


def test_log_ratios_are_limited():
  mask = np.ones((1, 3), bool)
  batch = batches.make()[0].replace(loss_mask_BL=mask)

  @jax.jit
  def run(logprobs, log_ratio):
    options = {'level': 'sequence', 'gradient': 'segment', 'reduce': 'sum'}
    return (
      ratios.token_log_ratio(logprobs, np.zeros((1, 3)), mask),
      ratios.level_log_ratio(log_ratio, batch, num_turns=1, **options),
    )

  log_ratio, total = run(np.array([[50.0, -60.0, 1.0]]), np.full((1, 3), 19.0))
  np.testing.assert_array_equal(log_ratio, [[20.0, -20.0, 1.0]])
  np.testing.assert_array_equal(total, np.full((1, 3), 20.0))
