"""The figures in the docstrings of recipes are those of their plans."""

import importlib
import pathlib
import re

import pytest

from stppo_jax.analysis import plan as plan_lib
from stppo_jax.configs import slices
from stppo_jax.parallel import topology

_PUBLISHED = pathlib.Path(__file__).parents[1] / 'models' / 'published'


@pytest.mark.parametrize('size', slices.SLICES)
@pytest.mark.parametrize('name', ['nq_hotpotqa', 'medical'])
def test_the_figures_of_a_recipe_are_those_of_its_plan(name, size):
  module = importlib.import_module(f'stppo_jax.configs.{name}_{size}')
  config = module.get_config()
  config.model.path = str(_PUBLISHED / f'qwen2_5_{size}')
  doc = module.__doc__ or ''
  where = re.search(r'--topology=(\S+)', doc)
  assert where is not None and where[1] == slices.SLICES[size].topology
  plan = plan_lib.make(
    config,
    length=config.env.max_length,
    loss_fraction=0.5,
    topology=topology.find(where[1]),
  )
  at_least, seconds = plan.seconds
  hours = plan.num_steps * seconds / 3600
  gib = topology.GIB
  for line in (
    f'{plan.total / gib:.1f} of {plan.limit / gib:.2f} GiB of a chip',
    f'{seconds:.0f} seconds a step, at least {at_least:.0f}',
    f'{hours:.0f} hours and {hours * plan.topology.num_chips:,.0f} chip-hours '
    f'for {plan.num_steps} steps',
  ):
    assert f'    {line}\n' in doc
  assert plan.fits
