"""Print the complete configuration, one `key = value` per line.

python -m stppo_jax config --config=FILE.py[:ALGORITHM]
    [--config.KEY=VALUE ...]

  --config=FILE.py[:ALGORITHM]  the config, as for train
  --config.KEY=VALUE            sets the key of a line

After these lines come lines that begin with #. They name the keys whose values
differ from configs/base.py, and the numbers that are computed from the
configuration, such as the number of updates per collection.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from stppo_jax import settings
from stppo_jax.commands.flags import configuration
from stppo_jax.configs import base


def main(argv: Sequence[str]) -> int:
  """Prints the configuration; returns the exit code."""
  config = configuration.parse(argv)
  values = settings.flatten(config)
  lines = [f'{key} = {value!r}' for key, value in values.items()]
  lines += differences(values, base.values())
  lines += [f'# {line}' for line in derived(config)]
  print('\n'.join(lines))
  return 0


def differences(
  values: Mapping[str, Any], others: Mapping[str, Any]
) -> list[str]:
  """Returns a line for each value that differs from the base config.

  Args:
    values: a dict from each dotted key of a config to its value.
    others: the same dict of the base config.
  """
  lines = []
  for key, value in values.items():
    if key not in others:
      lines.append(f'# differs from base: {key} = {value!r}, no key there')
    elif others[key] != value:
      lines.append(
        f'# differs from base: {key} = {value!r}, not {others[key]!r}'
      )
  return lines


def derived(config: Any) -> list[str]:
  """Returns lines with numbers that are computed from a configuration."""
  rollout, updates = config.rollout, config.updates
  rows, minibatch = rollout.trajectories_per_step, updates.minibatch_size
  count = updates.num_epochs * (rows // minibatch)
  microbatch = updates.microbatch_size or minibatch
  # The number of updates between the policy that collected the trajectories and
  # the policy before the last update on these trajectories.
  staleness = (1 + rollout.steps_ahead) * count - 1
  length = config.env.max_length
  return [
    f'questions per step: {rows // rollout.group_size:,}',
    f'updates per collection: {count:,}',
    f'updates of the run: {count * config.num_steps:,}',
    f'microbatches per update: at most {-(-minibatch // microbatch):,}',
    f'tokens per update: at most {minibatch * length:,}',
    f'tokens of the run: at most {rows * length * config.num_steps:,}',
    'off-policy degree: at the last update of a step, the policy is '
    f'{staleness:,} updates newer than the one that collected',
  ]
