"""Reads the config that a run was started with from its folder."""

import json
import pathlib
from typing import Any

from ml_collections import config_dict


def read(folder: pathlib.Path) -> Any:
  """Returns the config that a run was started with.

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
  return _with_tuples(config_dict.ConfigDict(content))


def _with_tuples(config: Any) -> Any:
  """Turns lists, which JSON has in place of tuples, into tuples, in place."""
  with config.ignore_type():
    for key, value in config.items():
      if isinstance(value, config_dict.ConfigDict):
        _with_tuples(value)
      elif isinstance(value, list | tuple):
        config[key] = tuple(value)
  return config
