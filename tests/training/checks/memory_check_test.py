"""A run that cannot fit its devices is refused before anything is loaded."""

import pytest

from stppo_jax.analysis import plan
from stppo_jax.training.building import assembly
from stppo_jax.training.checks import memory_check
from tests.training import runs


def _need(config) -> int:
  made = plan.make(config, length=128, loss_fraction=0.5)
  return sum(made.sizes.values()) + made.estimated['gradients']


def test_memory_that_is_not_known_refuses_nothing():
  assert memory_check.device_memory() is None  # as on every CPU
  memory_check.check(runs.config(), None)


def test_the_line_names_what_would_fit():
  config = runs.config()
  other = runs.config(mesh__data=4, mesh__fsdp=2, rollout__tensor=1)
  need, enough = _need(config), _need(other)
  assert enough < need
  memory_check.check(config, need)
  with pytest.raises(assembly.Misconfigured) as error:
    memory_check.check(config, enough)
  line = str(error.value)
  assert '\n' not in line and error.value.exit_code == 2
  needed, there = (f'{size / 2**30:.2g}' for size in (need, enough))
  assert line.startswith(f'the run needs {needed} GiB of each device or more (')
  assert ' for policy optimizer, ' in line
  assert line.endswith(
    f', and there are {there}; with mesh.data=4 mesh.fsdp=2 mesh.tensor=1 '
    f'rollout.tensor=1 it needs {there}'
  )
  with pytest.raises(assembly.Misconfigured) as error:
    memory_check.check(config, 1)
  assert '; no other fsdp and rollout.tensor fit: with ' in str(error.value)
