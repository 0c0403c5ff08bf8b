"""From command-line flags to a checked configuration, or to every error.

    --config=FILE.py[:ROW]     get_config(ROW) of that file, a Python program
    --config.a.b=VALUE         one key set; also `--config.a.b VALUE`; a name of
                               a block is set before its options
    --workdir=DIR              where the run lives

Nothing here imports jax or touches a device.
"""

import ast
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import difflib
import importlib.util
import pathlib

from ml_collections import config_dict

from configs import algorithms
from configs import schema

_OVERRIDE = 'config.'
# The key of a block's name, to the kind of block.
_NAMES = {f'algorithm.{kind}.name': kind for kind in algorithms.BLOCKS}


class ConfigurationError(Exception):
  """What is wrong with a command line: `lines`, one each, all of them."""

  exit_code = 2

  def __init__(self, lines: Sequence[str]):
    super().__init__('\n'.join(lines))
    self.lines = list(lines)


@dataclasses.dataclass(frozen=True)
class Arguments:
  """A parsed command line.

  Attributes:
    config: complete and checked; locked, so that a new key is an error.
    workdir: as given; it may not exist yet. None for commands without one.
    options: the command's own flags, each of the type of its default.
  """

  config: config_dict.ConfigDict
  workdir: pathlib.Path | None
  options: Mapping[str, object]


def parse(
  argv: Sequence[str],
  *,
  workdir: bool = True,
  options: Mapping[str, object] | None = None,
) -> Arguments:
  """The command line as a configuration.

  Args:
    argv: flags without the program's and the command's name. A flag given
      twice counts as given last.
    workdir: whether the command has (and then needs) `--workdir`.
    options: name to default of the command's own flags; a flag's value must
      have the type of its default.

  Raises:
    ConfigurationError: with all errors of flags, keys, values and rules.
  """
  options = dict(options or {})
  known = ['config', *(['workdir'] if workdir else []), *options]
  flags, overrides, errors = _split(argv, known)
  for name in ('config', 'workdir'):
    if name in known and not flags.get(name):
      errors.append(f'--{name}: missing')
  for name in options:
    if name in flags:
      try:
        options[name] = _typed(flags[name], options[name])
      except ValueError as error:
        errors.append(f'--{name}={flags[name]}: {error}')
  path = pathlib.Path(flags['workdir']) if flags.get('workdir') else None
  if path is not None and path.exists() and not path.is_dir():
    errors.append(f'--workdir={path}: exists and is not a folder')
  config = None
  if flags.get('config'):
    try:
      config = load(flags['config'])
    except ValueError as error:
      errors.append(f'--config={flags["config"]}: {error}')
  if config is not None:
    for key, text in sorted(overrides.items(), key=_names_first):
      try:
        override(config, key, text)
      except ValueError as error:
        errors.append(f'--config.{key}={text}: {error}')
    errors += [f'config.{line}' for line in schema.check(config)]
  if errors:
    raise ConfigurationError(errors)
  return Arguments(config.lock(), path, options)


def load(name: str) -> config_dict.ConfigDict:
  """The configuration that the file `FILE.py[:ROW]` describes.

  Raises:
    ValueError: no such file or row, or a file that fails; one line.
  """
  file, _, row = name.partition(':')
  path = pathlib.Path(file)
  if not path.is_file():
    there = sorted(str(p) for p in path.parent.glob('*.py'))
    raise ValueError('no such file' + _closest(file, there))
  spec = importlib.util.spec_from_file_location(path.stem, path)
  if spec is None or spec.loader is None:
    raise ValueError('not a Python file')
  module = importlib.util.module_from_spec(spec)
  # The file is anybody's program: whatever it raises is its error, not ours.
  try:
    spec.loader.exec_module(module)
    config = module.get_config(row) if row else module.get_config()
  except ValueError as error:
    raise ValueError(_one_line(error)) from error
  except Exception as error:
    name = type(error).__name__
    raise ValueError(f'fails with {name}: {_one_line(error)}') from error
  if not isinstance(config, config_dict.ConfigDict):
    raise ValueError(
      f'get_config returns {type(config).__name__}, expected a ConfigDict'
    )
  return config.copy_and_resolve_references()


def _split(argv, known):
  """Flags by name, overrides by key, and what is neither."""
  flags, overrides, errors = {}, {}, []
  rest = list(argv)
  while rest:
    flag = rest.pop(0)
    name, equals, value = flag.removeprefix('--').partition('=')
    if not flag.startswith('--'):
      errors.append(f'{flag}: not a flag; flags start with --')
      continue
    if name not in known and not name.startswith(_OVERRIDE):
      choices = [f'--{k}' for k in known] + ['--config.KEY']
      errors.append(f'{flag}: unknown flag' + _closest(f'--{name}', choices))
      continue
    if not equals:
      if not rest or rest[0].startswith('--'):
        errors.append(f'{flag}: has no value')
        continue
      value = rest.pop(0)
    if name in known:
      flags[name] = value
    else:
      overrides[name.removeprefix(_OVERRIDE)] = value
  return flags, overrides, errors


def _names_first(item):
  """Sort key: the name of a block of options comes before its options."""
  return item[0] not in _NAMES


def override(config: config_dict.ConfigDict, key: str, text: str) -> None:
  """Sets a dotted key to a value of its type.

  Another name of a block whose options depend on its name (`BLOCKS` of
  `configs/algorithms.py`) brings that block's options, with their defaults.

  Raises:
    ValueError: no such key, or a value of another type; one line.
  """
  if key in _NAMES and text in algorithms.BLOCKS[_NAMES[key]]:
    kind = _NAMES[key]
    if config.algorithm[kind]['name'] != text:
      block = algorithms.block(kind, text)
      config.algorithm[kind] = config_dict.ConfigDict(block)
    return
  *blocks, leaf = key.split('.')
  level, seen = config, 'config'
  for name in blocks:
    if name not in level or not isinstance(level[name], config_dict.ConfigDict):
      raise ValueError(_unknown(name, level, seen))
    level, seen = level[name], f'{seen}.{name}'
  if leaf not in level:
    raise ValueError(_unknown(leaf, level, seen))
  if isinstance(level[leaf], config_dict.ConfigDict):
    keys = ', '.join(level[leaf].keys())
    raise ValueError(f'a block, not a value; set one of its keys: {keys}')
  with level.ignore_type():  # checked here, with a line that names the key
    level[leaf] = _typed(text, level[leaf])


def _unknown(name, level, seen):
  if name in level:
    return f'{seen}.{name} is a value and has no keys'
  return f'no key {name!r} in {seen}' + _closest(name, list(level.keys()))


def _typed(text, current):
  """`text` as a value of the type of `current`; int passes as float.

  Raises:
    ValueError: it has another type; the message names the expected one.
  """
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    value = text
  if current is None:
    return value
  if isinstance(current, str):
    return value if isinstance(value, str) else text
  if isinstance(current, bool):
    if isinstance(value, bool):
      return value
    raise ValueError('expected True or False')
  if isinstance(current, float):
    if isinstance(value, int | float) and not isinstance(value, bool):
      return float(value)
    raise ValueError(f'expected a number (float), such as {current}')
  if isinstance(current, tuple | list):
    if isinstance(value, tuple | list):
      return type(current)(value)
    raise ValueError("expected a tuple, such as (1, 2) or ('a',)")
  if isinstance(value, bool) or not isinstance(value, type(current)):
    raise ValueError(f'expected {type(current).__name__}, such as {current}')
  return value


def _closest(name, choices):
  """'; did you mean ...? choices: ...' for a name that is not a choice."""
  near = difflib.get_close_matches(name, choices, n=2)
  hint = f' did you mean {" or ".join(near)}?' if near else ''
  return f';{hint} choices: {", ".join(choices)}' if choices else ''


def _one_line(error):
  return ' '.join(str(error).split())
