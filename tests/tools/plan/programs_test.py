"""A plan reads the cost of compiled programs."""

import pytest

from stppo_jax.tools.plan import plan
from stppo_jax.training import engines
from tests.training import runs


def test_publishing_adds_up_the_programs_of_its_layers():
  config = runs.config(model__num_layers=3, mesh__fsdp=8)
  found = plan.make(
    config, length=128, loss_fraction=0.5, programs=('publish',)
  )
  cost, weights = found.programs['publish'], found.held.sizes
  # The weights, and the number of a layer.
  assert cost.arguments == weights['policy parameters'] + 4
  made = found.held.collecting[engines.WEIGHTS]
  assert cost.results == pytest.approx(made, rel=0.01)  # and a table of them
  # Its results are the engine's weights, which are not there before.
  needed = cost.peak - weights['policy parameters']
  assert cost.results <= found.temporaries['publish'] == needed
  # Each of the layers gathers its matrices; norms are whole everywhere.
  gathered = sum(x.sent for x in cost.collectives)
  assert gathered == pytest.approx(7 / 8 * cost.results, rel=0.05)
