"""Limits; the loops over random batches are in losses_test.py."""

import jax
import numpy as np

from stppo_jax.rl import ratios
from tests.rl import batches


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
