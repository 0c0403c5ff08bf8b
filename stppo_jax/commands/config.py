"""Print the resolved configuration, one `key = value` a line.

    python -m stppo_jax config --config=FILE.py[:ROW] [--config.KEY=VALUE ...]

Every line is the override that gives it: --config.KEY=VALUE.
"""

from collections.abc import Sequence

from stppo_jax import settings
from stppo_jax.commands import configuration


def main(argv: Sequence[str]) -> int:
  arguments = configuration.parse(argv, workdir=False)
  values = settings.flatten(arguments.config)
  print('\n'.join(f'{key} = {value!r}' for key, value in values.items()))
  return 0
