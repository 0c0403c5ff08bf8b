"""Print the complete configuration, one `key = value` per line.

python -m stppo_jax config --config=FILE.py[:ALGORITHM]
    [--config.KEY=VALUE ...]

  --config=FILE.py[:ALGORITHM]  the config, as for train
  --config.KEY=VALUE            sets the key of a line
"""

from collections.abc import Sequence

from stppo_jax import settings
from stppo_jax.commands import configuration


def main(argv: Sequence[str]) -> int:
  """Prints the configuration; returns the exit code."""
  arguments = configuration.parse(argv, workdir=False)
  values = settings.flatten(arguments.config)
  print('\n'.join(f'{key} = {value!r}' for key, value in values.items()))
  return 0
