"""The figures in the docstrings of recipes are those of their plans."""

import importlib
import pathlib
import re

import pytest

from stppo_jax import settings
from stppo_jax.configs import slices
from stppo_jax.parallel import topology
from stppo_jax.tools.plan import plan as plan_lib

_PUBLISHED = pathlib.Path(__file__).parents[1] / 'models' / 'published'


def _doc(module) -> str:
  """Returns the docstring of a recipe, whose commands have its file."""
  doc = module.__doc__
  commands = re.findall(r'--config=configs/(\w+)\.py', doc)
  assert commands == [module.__name__.rpartition('.')[2]] * 2  # train, plan
  return doc


@pytest.mark.parametrize('size', slices.SLICES)
@pytest.mark.parametrize('name', ['nq_hotpotqa', 'medical'])
def test_the_figures_of_a_recipe_are_those_of_its_plan(name, size):
  module = importlib.import_module(f'stppo_jax.configs.{name}_{size}')
  config = module.get_config()
  config.model.path = str(_PUBLISHED / f'qwen2_5_{size}')
  doc = _doc(module)
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


@pytest.mark.parametrize('size', slices.SLICES)
@pytest.mark.parametrize('name', ['nq', 'hotpotqa'])
def test_one_data_set_has_the_figures_of_both(name, size):
  one, both = (
    importlib.import_module(f'stppo_jax.configs.{x}_{size}')
    for x in (name, 'nq_hotpotqa')
  )
  ours = settings.flatten(one.get_config())
  others = settings.flatten(both.get_config())
  differ = [key for key in ours if ours[key] != others[key]]
  assert differ == ['data.evaluation', 'data.train']
  figures = [_doc(x).partition('--topology=')[2] for x in (one, both)]
  assert figures[0] and figures[0] == figures[1]
