"""The packer of a run leaves little of a forward pass unused."""

import numpy as np
import pytest

from benchmarks import waste


def test_equal_trajectories_that_fill_rows_waste_nothing():
  lengths_B = np.full(64, 2048)
  case = waste.Case(num_shards=8, minibatch=64, row_length=4096, goal=1.0)
  found = waste.useful(lengths_B, np.arange(64), case)
  assert found.tokens == found.before == 1.0
  # Each of two in a row sees half of what a whole row would.
  assert 0.9 < found.all < 1.0


@pytest.mark.slow
def test_the_goals_are_reached():
  table, good = waste.run(steps=3)
  assert good, table
  assert len(table.splitlines()) == 2 + len(waste.MEDIANS) * len(waste.CASES)
