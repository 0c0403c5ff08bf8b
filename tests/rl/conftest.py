"""The pure maths is tested in float64, so that a tolerance means something."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _double_precision():
  assert jax.config.jax_numpy_rank_promotion == 'raise'
  with jax.enable_x64(True):
    yield
