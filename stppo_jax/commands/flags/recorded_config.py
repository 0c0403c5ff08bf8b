"""Reads the config that a run was started with from its folder."""

import json
import pathlib
from typing import Any

from ml_collections import config_dict

from stppo_jax import settings
from stppo_jax.configs import algorithms
from stppo_jax.configs import base


def read(folder: pathlib.Path) -> Any:
  """Returns the config that a run was started with.

  Keys that are younger than the run have their defaults, and keys that are no
  more are left out.

  Raises:
    ValueError: the folder is not that of a run of `train`.
  """
  path = folder / 'config.json'
  if not path.is_file():
    raise ValueError('no config.json: not the folder of a run')
  try:
    content = json.loads(path.read_text(encoding='utf-8'))
  except ValueError as error:
    raise ValueError(f'config.json is not JSON: {error}') from error
  if not isinstance(content, dict) or not (
    'algorithm' in content and isinstance(content.get('model'), dict)
  ):
    raise ValueError('config.json is not the record of a run')
  if 'batch_sha256' in content:
    raise ValueError("a run of prefer: its policy is in the folder's policy/")
  return _completed(_with_tuples(config_dict.ConfigDict(content)))


def _completed(recorded: Any) -> Any:
  """Returns the recorded config with today's keys."""
  config = base.get_config()
  known = settings.flatten(config)
  values = {
    key: value
    for key, value in settings.flatten(recorded).items()
    if key in known and not key.startswith('algorithm.')
  }
  with config.ignore_type():
    config.update_from_flattened_dict(values)
    # Its sections have the options of the choices that they name.
    config.algorithm = recorded.algorithm
    for kind, choices in algorithms.DEFAULTS.items():
      section = config.algorithm[kind]
      if 'name' in section and section.name in choices:
        for option, value in choices[section.name].items():
          if option not in section:
            section[option] = value
  return config


def _with_tuples(config: Any) -> Any:
  """Turns lists, which JSON has in place of tuples, into tuples, in place."""
  with config.ignore_type():
    for key, value in config.items():
      if isinstance(value, config_dict.ConfigDict):
        _with_tuples(value)
      elif isinstance(value, list | tuple):
        config[key] = tuple(value)
  return config
