"""The table of environments.

An entry is a class that implements `protocol.Environment`; its key is a value
of the config key `env.name`.
"""

from stppo_jax.envs import gymnasium
from stppo_jax.envs import protocol
from stppo_jax.envs import search
from stppo_jax.envs import text_games
from stppo_jax.envs import tools

ENVIRONMENTS: dict[str, type[protocol.Environment]] = {
  'gymnasium': gymnasium.GymnasiumEnvironment,
  'search': search.SearchEnvironment,
  'textworld': text_games.TextWorldEnvironment,
  'tools': tools.ToolsEnvironment,
}


def find(name: str) -> type[protocol.Environment]:
  """Returns the class of the environment with a given name.

  Raises:
    ValueError: if no environment has this name; the message lists the choices.
  """
  if name not in ENVIRONMENTS:
    choices = ', '.join(sorted(ENVIRONMENTS))
    raise ValueError(f'unknown environment {name!r}; choices: {choices}')
  return ENVIRONMENTS[name]
