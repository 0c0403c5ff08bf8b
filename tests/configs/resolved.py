"""The resolved configurations that are kept, and the script that writes them.

python -m tests.configs.resolved

`base.txt` has every key. The other files have the lines in which a config, or
an entry of the table of algorithms, differs from it, and what follows from the
config.
"""

import importlib
import pathlib

from stppo_jax import settings
from stppo_jax.commands import config as config_command
from stppo_jax.configs import algorithms
from stppo_jax.configs import base
from stppo_jax.configs import slices

# The configs that take the size of a model.
SIZED = ('nq', 'hotpotqa', 'nq_hotpotqa', 'medical')
GOLDEN = pathlib.Path(__file__).resolve().parent / 'golden'
_ROOT = pathlib.Path(__file__).resolve().parents[2]


def files() -> list[str]:
  """Returns the names of the shipped configs, without `base`."""
  return sorted(
    path.stem
    for path in (_ROOT / 'configs').glob('*.py')
    if 'def get_config(' in path.read_text('utf-8') and path.stem != 'base'
  )


def texts() -> dict[str, str]:
  """Returns file name to text of everything that is kept."""
  everything = settings.flatten(base.get_config())
  made = {'base.txt': [f'{key} = {x!r}' for key, x in everything.items()]}
  modules = {name: f'stppo_jax.configs.{name}' for name in files()}
  configs = {
    name: importlib.import_module(module).get_config()
    for name, module in {
      **modules,
      **{
        name: f'studies.{name}'
        for name in ('collapse', 'critic', 'game_critic', 'gpu')
      },
    }.items()
  }
  for name in SIZED:
    for size in slices.SLICES:
      module = importlib.import_module(modules[name])
      configs[f'{name}_{size}'] = module.get_config(size)
  for name, config in configs.items():
    made[f'{name}.txt'] = config_command.differences(
      settings.flatten(config), everything
    ) + [f'# {line}' for line in config_command.derived(config)]
  made['algorithms.txt'] = []
  for name in algorithms.ALGORITHMS:
    values = settings.flatten(base.get_config(name))
    lines = config_command.differences(values, everything)
    made['algorithms.txt'] += [name, *(f'  {line[2:]}' for line in lines)]
  return {
    name: '\n'.join(lines).replace(f'{_ROOT}/', '') + '\n'
    for name, lines in made.items()
  }


if __name__ == '__main__':
  for old in GOLDEN.glob('*.txt'):
    old.unlink()
  for name, text in texts().items():
    (GOLDEN / name).write_text(text, encoding='utf-8')
