"""Turns a command line into a checked configuration; reports every error.

    --config=FILE.py[:ALGORITHM]  the result of get_config(ALGORITHM) in the
                                  file. If FILE.py does not exist here, the file
                                  of the package is read. quickstart is short
                                  for configs/quickstart.py
    --config.a.b=VALUE            sets one key; also `--config.a.b VALUE`
    --config.a.b, --noconfig.a.b  sets a key to True, to False

The flags are written as for `config_flags` of ml_collections. That module is
not used, for two reasons. It stops at the first wrong flag, but all errors
should be reported. It does not know that the `name` of a section decides which
options the section has. Nothing here touches a device, and only the check of
changed options of an algorithm imports jax.

A configuration is annotated as `Any`: it is a ConfigDict, whose keys are
attributes that no type checker can check (`schema.check` checks them instead).
"""

from collections.abc import Sequence
import pathlib
from typing import Any

from absl import flags as absl_flags

from stppo_jax import exits
from stppo_jax import hub
from stppo_jax import settings
from stppo_jax.commands.flags import command_line
from stppo_jax.commands.flags import config_file
from stppo_jax.commands.flags import overrides as overrides_lib
from stppo_jax.configs import external
from stppo_jax.configs import schema
from stppo_jax.data import mixtures
from stppo_jax.workdir import named_files
from stppo_jax.workdir import recorded_config
from stppo_jax.workdir import run_folder

# The commands that train, but cannot start from another run and do not read
# num_steps. Maps each of them to the key that it reads in place of num_steps.
_OFFLINE = {
  'sft': 'sft.num_steps',
  'prefer': 'preference.num_epochs, the passes over the pairs',
}

# Checks that `schema.check` may leave out, because their results do not hold on
# another machine.
OF_THIS_MACHINE = external.OF_THIS_MACHINE
# One of the checks in OF_THIS_MACHINE. It may be left out only if a launcher
# starts a retriever beside the run, or if the command uses no retriever.
PASSAGES = external.passages_are_named
# Checks that `schema.check` may leave out, because they take long.
SLOW = (schema.check_algorithm,)
# The keys that name files and folders.
_PATHS = (
  *('env.prompt_template', 'init_from', 'model.path', 'model.reference_path'),
  *('model.value_path', 'model.tokenizer_path', 'model.lora.path'),
  *('data.root', 'sft.demonstrations'),
)


def parse(
  argv: Sequence[str],
  *,
  flags: absl_flags.FlagValues | None = None,
  required: Sequence[str] = (),
  writer: str = '',
  ignored: Sequence[Any] = (),
) -> Any:
  """Returns the complete, checked configuration that a command line describes.

  Args:
    argv: the arguments without the program's and the command's name.
    flags: the command's own flags, which get their values.
    required: the names of flags that must be given.
    writer: see `checked`.
    ignored: the checks that are left out, see `schema.check`.

  Raises:
    Misconfigured: see `checked`.
  """
  flags = absl_flags.FlagValues() if flags is None else flags
  return checked(
    flags,
    split(argv, flags, ('config', *required)),
    writer=writer,
    ignored=ignored,
  )


def split(
  argv: Sequence[str],
  flags: absl_flags.FlagValues,
  required: Sequence[str] = ('config',),
) -> command_line.Given:
  """Sets flags from a command line; returns its overrides and errors."""
  absl_flags.DEFINE_string('config', '', '', flag_values=flags)
  return command_line.parse(flags, argv, required=required, overrides=True)


def checked(
  flags: absl_flags.FlagValues,
  given: command_line.Given,
  *,
  writer: str = '',
  ignored: Sequence[Any] = (),
) -> Any:
  """Returns the checked configuration of a command line that was split.

  The configuration is locked, so setting a new key is an error.

  Args:
    flags: the flags of the command. If `--workdir` is one of them, its value
      must be a folder, or a path that does not exist yet.
    given: the result of `split`.
    writer: the name of the command, if the command writes to the workdir. A
      workdir that the command must not write to is then an error.
    ignored: the checks that are left out, see `schema.check`.

  Raises:
    Misconfigured: if flags, keys, values or rules have errors; the message has
      a line for each error.
  """
  errors = list(given.errors)
  workdir = flags.workdir if 'workdir' in flags else ''
  config: Any = None
  if name := flags.config:
    try:
      config = config_file.load(name)
    except exits.Misconfigured as error:
      errors.append(str(error))
    else:
      errors += overrides_lib.override_all(config, given.overrides)
      if external.model_exists not in ignored:
        begins = 'restart' in flags and flags.restart
        recorded_config.pin(config, '' if begins else workdir)
        errors += [f'config.{x}' for x in external.adapter_options(config)]
      errors += [f'config.{line}' for line in schema.check(config, ignored)]
      if writer in _OFFLINE and config.init_from:
        errors.append(
          f'config.init_from={config.init_from}: must be empty for {writer}, '
          'which starts from model.path'
        )
      if writer in _OFFLINE and 'num_steps' in given.overrides:
        errors.append(
          f'--config.num_steps={given.overrides["num_steps"]}: {writer} does '
          f'not use it; set {_OFFLINE[writer]}'
        )
  if workdir and writer:
    # The folders that a config names are known only if the config is valid.
    folders = {} if errors else folders_read(config)
    errors += run_folder.problems(
      workdir, flag='--workdir', command=writer, reads=folders
    )
  elif workdir and pathlib.Path(workdir).is_file():
    errors.append(f'--workdir={workdir}: exists and is not a folder')
  command_line.refuse(errors)
  return config.lock()


def paths(config: Any) -> dict[str, str]:
  """Returns a dict from config keys to the files and folders that they name."""
  values = settings.flatten(config)
  names = [key for key in named_files.MODELS if hub.is_name(values[key])]
  return {
    key: values[key] for key in _PATHS if values[key] and key not in names
  }


def folders_read(config: Any) -> dict[str, pathlib.Path]:
  """Returns the folders of models, tokenizers and data that a config names.

  Args:
    config: a valid configuration.

  Returns:
    A dict from each key that names a folder, or a file in a folder, to the path
    of the folder.
  """
  model, data = config.model, config.data
  folders = {
    f'model.{key}': pathlib.Path(model[key])
    for key in ('path', 'reference_path', 'value_path', 'tokenizer_path')
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
