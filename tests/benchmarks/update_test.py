"""The benchmark of the update runs, on the shapes of the tests' runs."""

import pytest

from benchmarks import update
from tests.training import runs


@pytest.mark.slow
def test_levels_start_equal_and_are_timed():
  table = update.run(runs.config(), length=128, repeats=2)
  assert [line.split('|')[1].strip() for line in table.splitlines()[2:]] == [
    'token_ppo',
    'turn_ppo',
    'token_ppo again',
  ]
  # Another loss is not the same algorithm at a ratio of 1.
  metrics = [{'actor/pg_loss': x} for x in (1.0, 1.1)]
  with pytest.raises(AssertionError, match='actor/pg_loss'):
    update._assert_parity(metrics)
