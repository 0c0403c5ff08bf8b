import jax
import numpy as np
import pytest

from stppo_jax.rl import aggregation
from stppo_jax.rl import segments
from tests.rl import batches
from tests.rl import twins

NAMES = pytest.mark.parametrize('name', aggregation.AGGREGATES)

X = np.array([[1.0, 3.0, 50.0, 8.0], [6.0, 50.0, 50.0, 50.0]])
TURNS = np.array([[1, 1, 0, 2], [1, 0, 0, 0]], np.int32)


def _aggregate(x, turn_ids, mask, name, **options):
  return aggregation.aggregate(
    x, turn_ids, mask, name=name, num_turns=batches.T, **options
  )


@pytest.mark.parametrize(
  'name,total,count',
  [
    ('token_mean', 18.0, 4.0),
    ('turn_mean', 2.0 + 8.0 + 6.0, 3.0),
    ('sequence_mean', 4.0 + 6.0, 2.0),
  ],
)
def test_hand_computed(name, total, count):
  assert _aggregate(X, TURNS, TURNS > 0, name) == (total, count)


@NAMES
@pytest.mark.parametrize('implementation', segments.IMPLEMENTATIONS)
def test_is_the_loop(name, implementation):
  batch, x, _ = batches.make()
  total, count = jax.jit(_aggregate, static_argnums=3)(
    x, batch.turn_ids_BL, batch.loss_mask_BL, name
  )
  expected = twins.aggregate(x, batch.turn_ids_BL, batch.loss_mask_BL, name)
  np.testing.assert_allclose(total / count, expected, rtol=1e-12)
  alone = aggregation.aggregate_count(
    batch.turn_ids_BL,
    batch.loss_mask_BL,
    name=name,
    num_turns=batches.T,
    implementation=implementation,
  )
  assert alone == count


@NAMES
def test_totals_and_counts_add_up_over_rows(name):
  batch, x, _ = batches.make()
  turn_ids, mask = batch.turn_ids_BL, batch.loss_mask_BL
  parts = [
    _aggregate(x[i : i + 2], turn_ids[i : i + 2], mask[i : i + 2], name)
    for i in range(0, batches.B, 2)
  ]
  np.testing.assert_allclose(
    np.sum(np.asarray(parts), axis=0),
    _aggregate(x, turn_ids, mask, name),
    rtol=1e-13,
  )


@NAMES
def test_nothing_to_train_on_is_zero_of_zero(name):
  assert _aggregate(X, TURNS, np.zeros((2, 4), bool), name) == (0, 0)
