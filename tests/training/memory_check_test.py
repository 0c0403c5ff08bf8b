"""A run that cannot fit its devices is refused before anything is loaded."""

import pytest

from stppo_jax import exits
from stppo_jax.tools.plan import plan
from stppo_jax.training.checks import memory_check
from tests.training import runs


def _need(config) -> int:
  made = plan.make(config, length=128, loss_fraction=0.5)
  return sum(made.sizes.values()) + made.estimated['gradients']


def test_memory_that_is_not_known_refuses_nothing():
  assert memory_check.device_memory() is None  # as on every CPU
  memory_check.check(runs.config(), None)


def test_the_line_names_what_would_fit():
  # Weights are larger than what a batch needs.
  config = runs.config(
    model__hidden_size=256,
    model__intermediate_size=2048,
    model__num_layers=4,
    updates__head_chunk=16,
  )
  need = _need(config)
  memory_check.check(config, need)
  with pytest.raises(exits.Misconfigured) as error:
    memory_check.check(config, need // 2)
  line = str(error.value)
  assert '\n' not in line and error.value.exit_code == 2
  needed, there = (f'{size / 2**30:.2g} GiB' for size in (need, need // 2))
  assert line.startswith(f'the run needs {needed} of each device or more (')
  assert ' for policy optimizer, ' in line
  assert f', and there are {there}; by the estimate it fits, in ' in line
  assert line.endswith(' GiB, with --config.mesh.data=1 --config.mesh.fsdp=-1')
  with pytest.raises(exits.Misconfigured) as error:
    memory_check.check(config, 1)
  assert str(error.value).endswith(
    '; no change of the config was found with which it fits; use more devices'
  )
