"""The config of what `--checkpoint` names: a run, or a model's directory."""

from collections.abc import Callable
from collections.abc import Mapping
import pathlib
from typing import Any

from stppo_jax.commands.flags import config_file
from stppo_jax.commands.flags import configuration
from stppo_jax.commands.flags import overrides as overrides_lib
from stppo_jax.commands.flags import recorded_config
from stppo_jax.configs import base
from stppo_jax.configs import schema
from stppo_jax.workdir import run_folder


def parse(
  given: configuration.Flags,
  *,
  change: Callable[[Any], None] = lambda config: None,
) -> tuple[pathlib.Path, Any, list[str]]:
  """Returns the checkpoint that flags name, its config, and what is wrong.

  Args:
    given: the flags of a command with --checkpoint, --config and overrides.
    change: changes the config before it is checked, and may raise ValueError.

  Returns:
    The folder; the config, which is None if it cannot be read; and a line for
    each error.
  """
  flags, errors = given.values, list(given.errors)
  checkpoint, reason = pathlib.Path(flags.get('checkpoint', '')), 'missing'
  if flags.get('checkpoint'):
    reason = problem(checkpoint)
    errors += [f'--checkpoint={checkpoint}: {reason}'] if reason else []
  elif 'checkpoint' not in given.meant:
    errors.append('--checkpoint: missing')
  config: Any = None
  try:
    config = read(None if reason else checkpoint, flags)
    errors += overrides_lib.override_all(
      config, given.overrides.items(), flag='--config.'
    )
    change(config)
    errors += [f'config.{line}' for line in schema.check(config)]
  except (OSError, ValueError) as error:
    errors.append(str(error))
  return checkpoint, config, errors


def problem(folder: pathlib.Path) -> str:
  """Returns why a folder is no checkpoint; '' if it is one."""
  if not folder.is_dir():
    return 'no such folder'
  owner = run_folder.command_of(folder)
  if owner in ('prefer', 'sft'):
    return f'a run of {owner}: its policy is in {folder / "policy"}'
  has_model = any(folder.glob('*.safetensors'))
  if owner != 'train' and not (folder / 'config.json').is_file():
    return 'neither a run, which train makes, nor a Hugging Face directory'
  if owner != 'train' and not has_model:
    return 'no *.safetensors, and no run: train has made none'
  return ''


def read(checkpoint: pathlib.Path | None, flags: Mapping[str, str]) -> Any:
  """Returns the config of a run, or one whose model a directory is.

  Args:
    checkpoint: the folder; None if there is none, so that the rest of the
      command line is checked all the same.
    flags: the flags of the command.

  Raises:
    ValueError: the config cannot be read; one line.
  """
  is_run = checkpoint and run_folder.command_of(checkpoint) == 'train'
  if flags.get('config'):
    try:
      config = config_file.load(flags['config'])
    except ValueError as error:
      raise ValueError(f'--config={flags["config"]}: {error}') from error
  elif checkpoint and is_run:
    config = recorded_config.read(checkpoint)
  else:
    config = base.get_config()
  if checkpoint and not is_run:
    config.model.path = str(checkpoint)
    config.model.lora.rank = 0
    config.sft.before_training, config.init_from = False, ''
  return config
