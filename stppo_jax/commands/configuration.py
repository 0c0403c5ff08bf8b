"""From command-line flags to a checked configuration, or to every error.

    --config=FILE.py[:ROW]     get_config(ROW) of that file, a Python program;
                               without such a file, of the packaged one
    --config.a.b=VALUE         one key set; also `--config.a.b VALUE`; a name of
                               a block is set before its options
    --workdir=DIR              where the run lives

Nothing here imports jax or touches a device.
"""

import ast
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import difflib
import importlib.util
import pathlib

from ml_collections import config_dict

from stppo_jax.configs import algorithms
from stppo_jax.configs import schema

_OVERRIDE = 'config.'
_PACKAGE = pathlib.Path(__file__).parent.parent
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
    workdir: as given; it may not exist yet. None where there is none.
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
    workdir: whether the command needs `--workdir`; one that merely may have
      it names it in `options`.
    options: name to default of the command's own flags; a flag's value must
      have the type of its default.

  Raises:
    ConfigurationError: with all errors of flags, keys, values and rules.
  """
  options = dict(options or {})
  needed = ['config', *(['workdir'] if workdir else [])]
  known = [*needed, *options]
  given = split(argv, known, overrides=True)
  flags, errors = given.values, list(given.errors)
  for name in needed:
    if not flags.get(name) and name not in given.meant:
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
    errors += override_all(config, given.overrides.items(), flag='--config.')
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
  path = _find(file)
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


def _find(file: str) -> pathlib.Path:
  """Returns the path of a config file.

  From a folder without such a file, `configs/base.py` is the one that is
  installed with the package.

  Raises:
    ValueError: if there is no such file; the message lists those that are.
  """
  choices = set()
  for folder in (pathlib.Path(), _PACKAGE):
    path = folder / file
    if path.is_file():
      return path
    names = [other.name for other in path.parent.glob('*.py')]
    choices.update(str(pathlib.Path(file).parent / name) for name in names)
  raise ValueError('no such file' + closest(file, sorted(choices)))


@dataclasses.dataclass(frozen=True)
class Flags:
  """A command line taken apart, nothing of it interpreted.

  Attributes:
    values: of the flags that have one, the last one given.
    lists: of the flags that may be given several times, all in order.
    switches: those given.
    overrides: key to value of `--config.KEY=VALUE`.
    meant: flags that a misspelt one may have meant; they are not missing.
    errors: what is none of these, one line each.
  """

  values: dict[str, str]
  lists: dict[str, list[str]]
  switches: set[str]
  overrides: dict[str, str]
  meant: set[str]
  errors: list[str]


def split(
  argv: Sequence[str],
  known: Sequence[str],
  *,
  lists: Collection[str] = (),
  switches: Collection[str] = (),
  overrides: bool = False,
) -> Flags:
  """Takes a command line apart; `--flag=value` and `--flag value` are one.

  Args:
    argv: flags without the program's and the command's name.
    known: names of the flags with a value.
    lists: those that may be given several times.
    switches: those without a value.
    overrides: whether `--config.KEY=VALUE` is known.
  """
  found = Flags({}, {name: [] for name in lists}, set(), {}, set(), [])
  choices = [f'--{name}' for name in (*known, *lists, *switches)]
  choices += ['--config.KEY'] if overrides else []
  rest = list(argv)
  while rest:
    flag = rest.pop(0)
    name, equals, value = flag.lstrip('-').partition('=')
    is_flag = flag.startswith('--')
    overrides_key = overrides and name.startswith(_OVERRIDE)
    if not is_flag or not (f'--{name}' in choices or overrides_key):
      problem = 'not a flag; flags start with --'
      if is_flag:
        problem = 'unknown flag' + closest(f'--{name}', choices)
      found.errors.append(f'{flag}: {problem}')
      near = difflib.get_close_matches(f'--{name}', choices)
      found.meant.update(choice.removeprefix('--') for choice in near)
      if flag.startswith('-') and not equals and rest:
        if not rest[0].startswith('-'):
          rest.pop(0)  # its value
      continue
    if name in switches:
      if equals:
        found.errors.append(f'{flag}: takes no value')
      found.switches.add(name)
      continue
    if not equals:
      if not rest or rest[0].startswith('--'):
        found.errors.append(f'{flag}: has no value')
        continue
      value = rest.pop(0)
    if name in lists:
      found.lists[name].append(value)
    elif overrides_key:
      found.overrides[name.removeprefix(_OVERRIDE)] = value
    else:
      found.values[name] = value
  return found


def override_all(
  config: config_dict.ConfigDict,
  overrides: Iterable[tuple[str, str]],
  *,
  flag: str,
  block: str = '',
) -> list[str]:
  """Sets several keys, names of blocks first; all errors, one line each.

  Args:
    config: changed in place.
    overrides: keys and the text of their values.
    flag: what stands before the key on the command line, for the messages.
    block: dotted, what the keys are relative to; '' = the whole config.
  """
  errors = []
  prefix = f'{block}.' if block else ''
  for key, text in sorted(overrides, key=lambda x: prefix + x[0] not in _NAMES):
    try:
      override(config, prefix + key, text)
    except ValueError as error:
      errors.append(f'{flag}{key}={text}: {error}')
  return errors


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
  return f'no key {name!r} in {seen}' + closest(name, list(level.keys()))


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
    if value in ('inf', '-inf'):  # no literal of the language
      return float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
      return float(value)
    raise ValueError(f'expected a number (float), such as {current}')
  if isinstance(current, tuple | list):
    if isinstance(value, str) and all(isinstance(x, str) for x in current):
      value = _names(value)
    if isinstance(value, tuple | list):
      return type(current)(value)
    raise ValueError("expected a tuple, such as (1, 2) or ('a',)")
  if isinstance(value, bool) or not isinstance(value, type(current)):
    raise ValueError(f'expected {type(current).__name__}, such as {current}')
  return value


def _names(text):
  """`tis,mis`, `(tis,mis)` or `[tis,mis]` as a tuple; others as they are."""
  if text[:1] + text[-1:] in ('()', '[]'):
    text = text[1:-1]
  names = tuple(name.strip() for name in text.split(',') if name.strip())
  return names if all(name.isidentifier() for name in names) else text


def closest(name: str, choices: Sequence[str]) -> str:
  """'; did you mean ...? choices: ...' for a name that is not a choice."""
  hint = nearest(name, choices)
  hint = f' {hint}' if hint else ''
  return f';{hint} choices: {", ".join(choices)}' if choices else ''


def nearest(name: str, choices: Sequence[str]) -> str:
  """'did you mean ...?', '' where no choice is near."""
  near = difflib.get_close_matches(name, choices, n=2)
  return f'did you mean {" or ".join(near)}?' if near else ''


def _one_line(error):
  return ' '.join(str(error).split())
