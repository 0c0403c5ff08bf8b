"""Reads the config that a run has recorded in its folder."""

import json
import pathlib
from typing import Any

from ml_collections import config_dict

from stppo_jax import buckets
from stppo_jax import exits
from stppo_jax import hub
from stppo_jax import settings
from stppo_jax.configs import base
from stppo_jax.configs import defaults
from stppo_jax.configs import schema
from stppo_jax.workdir import named_files
from stppo_jax.workdir import run_folder

# The beginnings of the config keys that an export uses.
_USED_KEYS = (
  'algorithm',
  'env.max_turns',
  'loss.',
  'model.',
  'policy_optimizer.',
  'rollout.',
  'seed',
  'sft.before_training',
  'updates.',
  'value_optimizer.',
)


def read(folder: pathlib.Path) -> Any:
  """Returns the config that a run of `train` has recorded in its folder.

  Keys that did not exist when the config was recorded get their defaults.
  Former names of keys are replaced, and keys that do not exist any more are
  left out.

  Raises:
    ValueError: the folder does not belong to a run of `train`.
  """
  path = folder / 'config.json'
  if not path.is_file():
    raise ValueError('no config.json: not the folder of a run')
  try:
    text = path.read_text(encoding='utf-8')
    content = json.loads(named_files.here(text), object_hook=_with_tuples)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'config.json is not JSON: {error}') from error
  if not isinstance(content, dict) or not (
    'algorithm' in content and isinstance(content.get('model'), dict)
  ):
    raise ValueError('config.json is not the record of a run')
  # Only `prefer` records the checksum of a batch.
  if 'batch_sha256' in content:
    raise ValueError('a run of prefer, whose policy is in its folder policy/')
  return _completed(config_dict.ConfigDict(content))


def pin(config: Any, workdir: str = '') -> None:
  """Adds a commit to each model name of the Hugging Face Hub in a config.

  A run that has begun keeps the commits that it recorded, even if the branches
  have moved since. If the Hub lacks a model or refuses access to the model, the
  name is not changed, and the check of the config reports the error later.

  Args:
    config: the config, which this function changes.
    workdir: the folder of the run, or its address in a bucket; '' if there is
      no folder.

  Raises:
    BucketError: the Hub, or the bucket of the run, is out of reach.
  """
  names = {
    key: value
    for key, value in settings.flatten({'model': config.model}).items()
    if key in named_files.MODELS and hub.is_name(value)
  }
  if not names:
    return
  record = pathlib.Path(workdir, 'config.json')
  text = b''
  if buckets.is_address(workdir):
    text = buckets.Bucket(workdir).read(record.name)
  elif workdir and record.is_file():
    text = record.read_bytes()
  earlier = settings.flatten(run_folder.parse(text))
  for key, name in names.items():
    try:
      with hub.naming(key, name):
        pinned = hub.pinned(name, str(earlier.get(key, '')))
    except hub.HubError as error:
      if error.exit_code != exits.USAGE:
        raise
    else:
      config.update_from_flattened_dict({key: pinned})


def _completed(recorded: Any) -> Any:
  """Returns a recorded config with the keys of this version.

  Keys that the record lacks get their defaults.
  """
  config = base.get_config()
  known = settings.flatten(config)
  values = {
    key: value
    for key, value in schema.present(settings.flatten(recorded)).items()
    if key in known and not key.startswith('algorithm.')
  }
  # In an earlier version, a key may have had values of another type. The schema
  # checks the values later.
  with config.ignore_type():
    config.update_from_flattened_dict(values)
    # The section `algorithm` is replaced as a whole, because the `name` in each
    # of its parts decides which options the part has.
    config.algorithm = recorded.algorithm
    for kind, choices in defaults.DEFAULTS.items():
      section = config.algorithm[kind]
      if 'name' in section and section.name in choices:
        for option, value in choices[section.name].items():
          if option not in section:
            section[option] = value
  return config


def _with_tuples(section: dict[str, Any]) -> dict[str, Any]:
  """Returns a section of a config, with tuples in place of the JSON lists."""
  return {
    key: tuple(value) if isinstance(value, list) else value
    for key, value in section.items()
  }


def prepare_export(config: Any, model: str | None = None) -> list[str]:
  """Prepares a recorded config for an export of the run's policy.

  Keys that an export does not use are set to values that need no file and no
  device, so that they cause no errors when the config is checked.

  Args:
    config: the result of `read`, which this function changes.
    model: the present place of the directory that was the run's `model.path`;
      None if the directory was not moved.

  Returns:
    A line for each reason why the policy cannot be exported.
  """
  with config.model.ignore_type():
    if model is not None:
      config.model.path = model
    config.model.reference_path = config.model.value_path = ''
    config.model.lora.path = ''
    config.model.reference_memory = 'device'
    config.model.attention = 'auto'
  problems = schema.check(config)
  errors = [line for line in problems if line.startswith(_USED_KEYS)]
  if not errors and not (
    config.model.path
    or config.model.tokenizer_path
    or config.sft.before_training
    or config.init_from
  ):
    # The run made its tokenizer from the data, and an export makes it again. So
    # the keys of the data must be right too.
    errors = [line for line in problems if line.startswith('data.')]
  return [f'config.{line}' for line in errors]
