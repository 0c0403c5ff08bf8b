"""Sets keys of a configuration to values that are given as texts.

A configuration is annotated as `Any`, see `configuration`.
"""

import ast
from collections.abc import Mapping
from typing import Any

from absl import flags as absl_flags
from ml_collections import config_dict

from stppo_jax import settings
from stppo_jax.configs import defaults
from stppo_jax.configs import schema

# Maps the key of each option that chooses other options, such as
# algorithm.bounds.name, to the section of the algorithm with these options.
_CHOOSING_KEYS = {f'algorithm.{kind}.name': kind for kind in defaults.DEFAULTS}


def override_all(
  config: Any,
  overrides: Mapping[str, str | bool],
  *,
  flag: str = '--config.',
  section: str = '',
) -> list[str]:
  """Sets several keys of a configuration in place; returns the errors.

  Keys that choose other options (such as algorithm.bounds.name) are set before
  those options, in whichever order they were given.

  Args:
    config: the configuration to change.
    overrides: the text of each value by its key, see `command_line.Given`.
    flag: the text before the key on the command line, for the messages.
    section: the dotted name of the section that the keys are relative to; ''
      for the whole configuration.

  Returns:
    An error line for each key that could not be set.
  """
  errors = []
  prefix = f'{section}.' if section else ''
  for key, text in sorted(
    overrides.items(), key=lambda item: prefix + item[0] not in _CHOOSING_KEYS
  ):
    try:
      _override(config, prefix + key, text)
    except ValueError as error:
      errors.append(f'{as_flag(key, text, start=flag)}: {error}')
  return errors


def as_flag(key: str, text: str | bool, start: str = '--config.') -> str:
  """Returns the flag that sets a key to the value `text`.

  If `text` is a bool, the flag has no value: --config.KEY or --noconfig.KEY.
  """
  if not isinstance(text, bool):
    return f'{start}{key}={text}'
  return f'{start}{key}' if text else f'--no{start.removeprefix("--")}{key}'


def _override(config: Any, key: str, text: str | bool) -> None:
  """Sets a dotted key to a value; the type of the value must stay the same.

  If the key chooses other options (such as algorithm.bounds.name), a new choice
  replaces these options by its own options, with their defaults.

  Args:
    config: the configuration to change.
    key: the dotted key.
    text: the text of the value; a bool if the flag has no value.

  Raises:
    ValueError: if there is no such key, or the value has another type; the
      message is one line.
  """
  kind = _CHOOSING_KEYS[key] if key in _CHOOSING_KEYS else ''
  if kind and isinstance(text, str) and text in defaults.DEFAULTS[kind]:
    if config.algorithm[kind]['name'] != text:
      options = defaults.choice(kind, text)
      config.algorithm[kind] = config_dict.ConfigDict(options)
    return
  if name := schema.successor(key):
    raise ValueError(f'is called {name} now')
  if key in schema.GONE:
    raise ValueError(f'is gone: {schema.GONE[key]}')
  *names, leaf = key.split('.')
  section, path = config, 'config'
  for name in names:
    if name not in section or not isinstance(
      section[name], config_dict.ConfigDict
    ):
      raise ValueError(_unknown(name, section, path))
    section, path = section[name], f'{path}.{name}'
  if leaf not in section:
    raise ValueError(_unknown(leaf, section, path))
  if isinstance(section[leaf], config_dict.ConfigDict):
    keys = ', '.join(section[leaf].keys())
    raise ValueError(f'a section, not a value; set one of its keys: {keys}')
  section[leaf] = typed(text, section[leaf])


def _unknown(name: str, section: Any, path: str) -> str:
  """Returns the error line for a name that is no key of a section."""
  if name in section:
    return f'{path}.{name} is a value and has no keys'
  return f'no key {name!r} in {path}' + settings.closest(
    name, list(section.keys())
  )


def typed(text: str | bool, current: Any) -> Any:
  """Returns the value of a text, converted to the type of `current`.

  The text of an int is accepted for a float, and a string needs no quotes.

  Raises:
    ValueError: if the value has another type; the message names the expected
      type.
  """
  if isinstance(current, bool):
    try:
      return absl_flags.BooleanParser().parse(text)
    except ValueError as error:
      raise ValueError('expected true or false') from error
  if isinstance(text, bool):
    raise ValueError('has no value' if text else 'not a boolean')
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    value = text
  if current is None:
    return value
  if isinstance(current, str):
    return value if isinstance(value, str) else text
  if isinstance(current, float):
    if value in ('inf', '-inf'):  # Python has no literals for infinities
      return float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
      return float(value)
    raise ValueError(f'expected a number (float), such as {current}')
  if isinstance(current, tuple | list):
    if isinstance(value, str) and all(isinstance(x, str) for x in current):
      value = _split_names(value)
    if isinstance(value, tuple | list):
      return type(current)(value)
    raise ValueError("expected a tuple, such as (1, 2) or ('a',)")
  if isinstance(value, bool) or not isinstance(value, type(current)):
    raise ValueError(f'expected {type(current).__name__}, such as {current}')
  return value


def _split_names(text: str) -> tuple[str, ...] | str:
  """Returns `tis,mis`, `(tis,mis)` or `[tis,mis]` as a tuple of names.

  A name may be a dotted key. A text that is no list of names is returned
  unchanged.
  """
  if text[:1] + text[-1:] in ('()', '[]'):
    text = text[1:-1]
  names = tuple(name.strip() for name in text.split(',') if name.strip())
  parts = [part for name in names for part in name.split('.')]
  return names if all(part.isidentifier() for part in parts) else text
