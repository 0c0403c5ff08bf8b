"""The figures in the docstrings of recipes are those of their plans."""

import importlib
import pathlib
import re

import pytest

from stppo_jax import exits
from stppo_jax import settings
from stppo_jax.commands.flags import config_file
from stppo_jax.configs import nq_hotpotqa
from stppo_jax.configs import slices
from stppo_jax.parallel import topology
from stppo_jax.tools.plan import plan as plan_lib
from tests.configs import resolved

_PUBLISHED = pathlib.Path(__file__).parents[1] / 'models' / 'published'


@pytest.mark.parametrize(
  ('name', 'size'),
  [
    # Plans are alike, and take a while.
    pytest.param(name, size, marks=[] if size == '7b' else pytest.mark.slow)
    for name in ('nq_hotpotqa', 'medical')
    for size in slices.SLICES
  ],
)
def test_the_figures_of_a_recipe_are_those_of_its_plan(name, size):
  module = importlib.import_module(f'stppo_jax.configs.{name}')
  doc = module.__doc__
  commands = re.findall(r'--config=configs/(\w+)\.py:(\S+)', doc)
  assert commands == [(name, 'st_ppo'), (name, 'st_ppo,7b'), (name, '7b')]
  where = re.search(r'--topology=(\S+)', doc)
  assert where is not None and where[1] == slices.SLICES['7b'].topology
  config = module.get_config(size)
  config.model.path = str(_PUBLISHED / f'qwen2_5_{size.removesuffix("_node")}')
  plan = plan_lib.make(
    config,
    length=config.env.max_length,
    loss_fraction=0.5,
    topology=topology.find(slices.SLICES[size].topology),
  )
  at_least, seconds = plan.seconds
  hours = plan.num_steps * seconds / 3600
  gib = topology.GIB
  heading = f'size topology GiB of a chip seconds a step {plan.num_steps} steps'
  figures = (
    f'{size} {slices.SLICES[size].topology} '
    f'{plan.total / gib:.1f} of {plan.limit / gib:.2f} '
    f'{seconds:.0f}, at least {at_least:.0f} '
    f'{hours:.0f} hours, {hours * plan.topology.num_chips:,.0f} chip-hours'
  )
  table = [' '.join(line.split()) for line in doc.splitlines()]
  assert heading in table and figures in table[table.index(heading) :]
  assert plan.fits


@pytest.mark.parametrize('size', slices.SLICES)
@pytest.mark.parametrize('name', ['nq', 'hotpotqa'])
def test_one_data_set_has_the_figures_of_both(name, size):
  one = importlib.import_module(f'stppo_jax.configs.{name}')
  ours = settings.flatten(one.get_config(size))
  others = settings.flatten(nq_hotpotqa.get_config(size))
  differ = [key for key in ours if ours[key] != others[key]]
  assert differ == ['data.evaluation', 'data.train']
  assert 'configs/nq_hotpotqa.py lists the hardware' in one.__doc__


@pytest.mark.parametrize('name', resolved.SIZED)
def test_the_algorithm_and_the_size_are_optional(name):
  def load(argument=''):
    return config_file.load(f'configs/{name}.py{argument}')

  assert load() == load(':st_ppo')
  assert load(':7b') == load(':st_ppo,7b') != load(':st_ppo')
  sized = load(':gspo,3b')
  assert sized.title == f'{name}: gspo 3b'
  assert sized.algorithm == load(':gspo').algorithm
  assert sized.mesh.fsdp == slices.SLICES['3b'].fsdp


@pytest.mark.parametrize(
  ('argument', 'unknown', 'choice'),
  [
    ('st_pp', 'st_pp', 'st_ppo'),
    ('st_pp,7b', 'st_pp', 'st_ppo'),
    ('st_ppo,8b', '8b', '7b_node'),
    ('st_ppo,', '', '7b_node'),
    ('7b,st_ppo', 'st_ppo', 'SIZE'),
    ('st_ppo,7b,3b', '3b', 'SIZE'),
  ],
)
def test_an_unknown_word_is_one_line_with_the_choices(
  argument, unknown, choice
):
  with pytest.raises(exits.Misconfigured) as found:
    config_file.load(f'configs/nq.py:{argument}')
  line = str(found.value)
  assert f'unknown {unknown!r}' in line and choice in line
  assert '\n' not in line
