"""Export the policy of a run to a directory that transformers and vLLM load.

python -m stppo_jax export --workdir=RUN --out=DIR [--step=N]
    [--dtype=float32|bfloat16]

The newest valid checkpoint, or that of step N. DIR gets config.json, the
tokenizer, and model.safetensors, or several files with their index; it is
replaced whole, or left as it was. The run may be alive.
"""

from collections.abc import Sequence
import json
import pathlib

from ml_collections import config_dict

from configs import schema
from stppo_jax.commands import configuration

_DTYPES = ('float32', 'bfloat16')
_FLAGS = ('workdir', 'out', 'step', 'dtype')


def main(argv: Sequence[str]) -> int:
  given = configuration.split(argv, _FLAGS)
  flags, errors = given.values, list(given.errors)
  for name in ('workdir', 'out'):
    if not flags.get(name) and name not in given.meant:
      errors.append(f'--{name}: missing')
  dtype, step = flags.get('dtype', _DTYPES[0]), flags.get('step')
  if dtype not in _DTYPES:
    errors.append(f'--dtype={dtype}: must be one of {", ".join(_DTYPES)}')
  if step is not None and not step.isdecimal():
    errors.append(f'--step={step}: must be an integer, 0 or greater')
  config = None
  if flags.get('workdir'):
    try:
      config = _recorded(pathlib.Path(flags['workdir']))
      errors += [f'config.{line}' for line in schema.check(config)]
    except (OSError, ValueError) as error:
      errors.append(f'--workdir={flags["workdir"]}: {error}')
  if errors:
    raise configuration.ConfigurationError(errors)
  # Late, so that a wrong flag is answered before jax is imported.
  from stppo_jax.training import policy_export

  return policy_export.export(
    config.lock(),
    flags['workdir'],
    flags['out'],
    step=None if step is None else int(step),
    dtype=dtype,
  )


def _recorded(workdir: pathlib.Path) -> config_dict.ConfigDict:
  """The config that a run was started with.

  Raises:
    ValueError: not the folder of a run of `train`.
  """
  path = workdir / 'config.json'
  if not path.is_file():
    raise ValueError('no config.json: not the folder of a run')
  try:
    content = json.loads(path.read_text(encoding='utf-8'))
  except ValueError as error:
    raise ValueError(f'config.json is not JSON: {error}') from error
  if not isinstance(content, dict) or 'algorithm' not in content:
    raise ValueError('config.json is not the record of a run')
  if 'batch_sha256' in content:
    raise ValueError("a run of prefer: its policy is in the folder's policy/")
  return _with_tuples(config_dict.ConfigDict(content))


def _with_tuples(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
  """JSON knows no tuples; configs know no lists."""
  with config.ignore_type():
    for key, value in config.items():
      if isinstance(value, config_dict.ConfigDict):
        _with_tuples(value)
      elif isinstance(value, list | tuple):
        config[key] = tuple(value)
  return config
