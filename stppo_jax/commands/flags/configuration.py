"""Turns command-line flags into a checked configuration; reports every error.

    --config=FILE.py[:ALGORITHM]  get_config(ALGORITHM) of that Python file, or
                                  of the packaged file if there is none;
                                  quickstart is short for
                                  configs/quickstart.py
    --config.a.b=VALUE            sets one key; also `--config.a.b VALUE`
    --config.a.b, --noconfig.a.b  sets a key to True, to False
    --workdir=DIR                 the folder of the run

The flags are written as for `config_flags` of ml_collections, which is not used
for two reasons: it stops at the first wrong flag, where all errors are reported
here, and it does not know that setting the `name` of a section decides which
options the section has. Nothing here imports jax or touches a device.

A configuration is annotated as `Any`: it is a ConfigDict, whose keys are
attributes that no type checker can check (`schema.check` checks them instead).
"""

from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import difflib
import pathlib
from typing import Any

from stppo_jax import exits
from stppo_jax import settings
from stppo_jax.commands.flags import config_file
from stppo_jax.commands.flags import overrides as overrides_lib
from stppo_jax.configs import schema
from stppo_jax.data import mixtures
from stppo_jax.workdir import run_folder

_OVERRIDE = 'config.'
# The commands that train but do not start from another run.
_OFFLINE = ('sft', 'prefer')


class ConfigurationError(Exception):
  """A wrong command line; `lines` has a line for every error."""

  exit_code = exits.USAGE

  def __init__(self, lines: Sequence[str]):
    super().__init__('\n'.join(lines))
    self.lines = list(lines)


@dataclasses.dataclass(frozen=True)
class Arguments:
  """A parsed command line.

  Attributes:
    config: the complete, checked configuration; it is locked, so that setting
      a new key is an error.
    workdir: the value of `--workdir`, a folder that may not exist yet; None if
      it is optional and not given.
    options: the command's own flags, each of the type of its default.
    switches: the flags without a value that were given.
  """

  config: Any
  workdir: pathlib.Path | None
  options: Mapping[str, Any]
  switches: Collection[str]


def parse(
  argv: Sequence[str],
  *,
  workdir: bool = True,
  options: Mapping[str, Any] | None = None,
  switches: Collection[str] = (),
  writer: str = '',
) -> Arguments:
  """Returns the configuration that a command line describes.

  Args:
    argv: flags without the program's and the command's name. The last of
      equal flags counts.
    workdir: whether `--workdir` must be given; a command for which it is
      optional names it in `options`.
    options: name to default of the command's own flags; a flag's value must
      have the type of its default.
    switches: names of the command's own flags without a value.
    writer: the name of the command, if it writes to the workdir; a folder that
      it must not write to is an error.

  Raises:
    ConfigurationError: every error of flags, keys, values and rules.
  """
  options = dict(options or {})
  required = ['config', *(['workdir'] if workdir else [])]
  known = [*required, *options]
  booleans = [name for name in options if isinstance(options[name], bool)]
  given = split(
    argv, known, switches=switches, booleans=booleans, overrides=True
  )
  flags, errors = given.values, list(given.errors)
  for name in required:
    if not flags.get(name) and name not in given.meant:
      errors.append(f'--{name}: missing')
  for name in options:
    if name in flags:
      try:
        options[name] = overrides_lib.typed(flags[name], options[name])
      except ValueError as error:
        errors.append(f'--{name}={flags[name]}: {error}')
  path = pathlib.Path(flags['workdir']) if flags.get('workdir') else None
  config: Any = None
  if flags.get('config'):
    try:
      config = config_file.load(flags['config'])
    except ValueError as error:
      errors.append(f'--config={flags["config"]}: {error}')
    else:
      overrides = given.overrides.items()
      errors += overrides_lib.override_all(config, overrides, flag='--config.')
      errors += [f'config.{line}' for line in schema.check(config)]
      if writer in _OFFLINE and config.init_from:
        errors.append(
          f'config.init_from={config.init_from}: must be empty for {writer}, '
          'which starts from model.path'
        )
  if path is not None and not writer and path.exists() and not path.is_dir():
    errors.append(f'--workdir={path}: exists and is not a folder')
  if path is not None and writer:
    # The folders that a config names are known only if it is valid.
    folders = {} if errors else folders_read(config)
    errors += run_folder.problems(
      flags['workdir'], flag='--workdir', command=writer, reads=folders
    )
  if errors:
    raise ConfigurationError(errors)
  assert config is not None  # a missing --config is an error
  return Arguments(config.lock(), path, options, given.switches)


def folders_read(config: Any) -> dict[str, pathlib.Path]:
  """Returns the folders of models, tokenizers and data that a config names.

  Args:
    config: a valid configuration.

  Returns:
    The folder of each key that names one, or a file in one.
  """
  model, data = config.model, config.data
  folders = {
    f'model.{key}': pathlib.Path(model[key])
    for key in ('path', 'reference_path', 'tokenizer_path')
    if model[key]
  }
  if config.init_from:
    folders['init_from'] = pathlib.Path(config.init_from)
  if data.name == 'tfds':
    folders['data.root'] = pathlib.Path(data.root)
  elif data.name == 'jsonl':
    for key in ('train', 'evaluation'):
      for element in mixtures.parse(data[key]) if data[key] else ():
        path = pathlib.Path(data.root, element.name)
        folders[f'data.{key}'] = path.parent
    if data.corpus:
      folders['data.corpus'] = pathlib.Path(data.root, data.corpus).parent
  return folders


@dataclasses.dataclass(frozen=True)
class Flags:
  """A command line taken apart; no value is interpreted yet.

  Attributes:
    values: flags with a value, the last of equal flags.
    lists: flags that may be given several times, all their values in order.
    switches: flags without a value.
    overrides: key to value of `--config.KEY=VALUE`; the value is True for
      `--config.KEY` and False for `--noconfig.KEY`.
    meant: flags that resemble an unknown one, probably misspelt; they are not
      reported as missing too.
    errors: one line for each argument that is none of these.
  """

  values: dict[str, str]
  lists: dict[str, list[str]]
  switches: set[str]
  overrides: dict[str, str | bool]
  meant: set[str]
  errors: list[str]


def split(
  argv: Sequence[str],
  known: Sequence[str],
  *,
  lists: Collection[str] = (),
  switches: Collection[str] = (),
  booleans: Collection[str] = (),
  overrides: bool = False,
  former_names: Mapping[str, str] | None = None,
) -> Flags:
  """Takes a command line apart; `--flag=value` and `--flag value` are equal.

  A boolean, a switch and a config key may also be set by `--flag`, and unset by
  `--noflag`.

  Args:
    argv: flags without the program's and the command's name.
    known: names of the flags with a value.
    lists: names of the flags that may be given several times.
    switches: names of the flags without a value.
    booleans: names of the flags in `known` that are booleans.
    overrides: whether `--config.KEY=VALUE` is known.
    former_names: former to present name of flags that were renamed; the
      former one is still accepted.
  """
  flags = Flags({}, {name: [] for name in lists}, set(), {}, set(), [])
  choices = [f'--{name}' for name in (*known, *lists, *switches)]
  choices += ['--config.KEY'] if overrides else []
  rest = list(argv)
  while rest:
    flag = rest.pop(0)
    name, equals, value = flag.lstrip('-').partition('=')
    name = (former_names or {}).get(name, name)
    is_flag = flag.startswith('--')
    positive = name.removeprefix('no')
    negated = positive != name and not equals
    negated &= positive in (*switches, *booleans) or (
      overrides and positive.startswith(_OVERRIDE)
    )
    name = positive if negated else name
    overrides_key = overrides and name.startswith(_OVERRIDE)
    if not is_flag or not (f'--{name}' in choices or overrides_key):
      problem = 'not a flag; flags start with --'
      if is_flag:
        problem = 'unknown flag' + settings.closest(f'--{name}', choices)
      flags.errors.append(f'{flag}: {problem}')
      near = difflib.get_close_matches(f'--{name}', choices)
      flags.meant.update(choice.removeprefix('--') for choice in near)
      if flag.startswith('-') and not equals and rest:
        if not rest[0].startswith('-'):
          rest.pop(0)  # the value of the unknown flag
      continue
    if name in switches:
      try:
        is_on = overrides_lib.boolean(value) if equals else not negated
      except ValueError as error:
        flags.errors.append(f'{flag}: {error}')
      else:
        (flags.switches.add if is_on else flags.switches.discard)(name)
      continue
    given: str | bool = value
    if not equals:
      if not negated and rest and not rest[0].startswith('--'):
        given = rest.pop(0)
      elif overrides_key or name in booleans:
        given = not negated
      else:
        flags.errors.append(f'{flag}: has no value')
        continue
    if name in lists:
      flags.lists[name].append(str(given))
    elif overrides_key:
      flags.overrides[name.removeprefix(_OVERRIDE)] = given
    else:
      flags.values[name] = str(given)
  return flags
