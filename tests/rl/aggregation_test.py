import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.configs import defaults
from stppo_jax.rl import aggregation
from stppo_jax.rl import masking
from stppo_jax.rl import segments
from tests.rl import batches
from tests.rl import twins

NAMES = pytest.mark.parametrize('name', aggregation.AGGREGATES)

X = np.array([[1.0, 3.0, 50.0, 8.0], [6.0, 50.0, 50.0, 50.0]])
TURNS = np.array([[1, 1, 0, 2], [1, 0, 0, 0]], np.int32)


def _batch(turn_ids, mask):
  made, _, _ = batches.make()
  return made.replace(turn_ids_BL=turn_ids, loss_mask_BL=mask)


@functools.partial(jax.jit, static_argnames=('name', 'implementation'))
def _aggregate(x, batch, name, implementation='segment_sum'):
  """Returns (total, count) of the terms x."""
  with batches.summing(implementation):
    weights, count = aggregation.aggregate_weights(
      batch, float, num_turns=batches.T, **defaults.choice('aggregate', name)
    )
  return jnp.sum(weights * masking.select(x, batch.loss_mask_BL)), count


@NAMES
@pytest.mark.parametrize('implementation', segments.IMPLEMENTATIONS)
def test_aggregates_equal_the_loop(name, implementation):
  batch, x, _ = batches.make()
  total, count = _aggregate(x, batch, name, implementation)
  options = defaults.choice('aggregate', name)
  np.testing.assert_allclose(
    total / count, twins.aggregate(x, batch, **options), rtol=1e-12
  )


@NAMES
def test_totals_and_counts_add_up_over_rows(name):
  batch, x, _ = batches.make()
  parts = [
    _aggregate(x[i : i + 2], batches.rows(batch, slice(i, i + 2)), name)
    for i in range(0, batches.B, 2)
  ]
  np.testing.assert_allclose(
    np.sum(np.asarray(parts), axis=0),
    _aggregate(x, batch, name),
    rtol=1e-13,
  )


@NAMES
def test_without_tokens_total_and_count_are_zero(name):
  batch = _batch(TURNS, np.zeros((2, 4), bool))
  assert _aggregate(X, batch, name) == (0, 0)
