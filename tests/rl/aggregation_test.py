"""Weights and counts of aggregates against plain loops."""

import jax
import numpy as np
import pytest

from stppo_jax.configs import defaults
from stppo_jax.rl import aggregation
from stppo_jax.rl import segments
from tests.rl import batches
from tests.rl import twins


@pytest.mark.parametrize('name', aggregation.AGGREGATES)
@pytest.mark.parametrize('implementation', segments.IMPLEMENTATIONS)
def test_aggregates_equal_the_loop(name, implementation):
  batch, x, _ = batches.make()
  options = defaults.choice('aggregate', name)
  with batches.summing(implementation):
    weights, count = jax.jit(
      lambda batch: aggregation.aggregate_weights(
        batch, float, num_turns=batches.T, **options
      )
    )(batch)
  weights = np.asarray(weights)
  assert not weights[~batch.loss_mask_BL].any()
  np.testing.assert_allclose(
    np.sum(weights * x) / count,
    twins.aggregate(x, batch, **options),
    rtol=1e-12,
  )
