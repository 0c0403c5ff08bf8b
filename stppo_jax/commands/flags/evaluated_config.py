"""Finds the config for the run or Hugging Face directory in `--checkpoint`."""

from collections.abc import Sequence
import os
import pathlib
from typing import Any

from absl import flags as absl_flags

from stppo_jax import buckets
from stppo_jax import exits
from stppo_jax.commands.flags import command_line
from stppo_jax.commands.flags import config_file
from stppo_jax.commands.flags import configuration
from stppo_jax.commands.flags import overrides as overrides_lib
from stppo_jax.configs import base
from stppo_jax.configs import external
from stppo_jax.configs import schema
from stppo_jax.data import mixtures
from stppo_jax.data import tables
from stppo_jax.workdir import bucket_files
from stppo_jax.workdir import recorded_config
from stppo_jax.workdir import run_folder

# A number of questions that is larger than any data set.
_ALL = 10**9


def parse(
  argv: Sequence[str], *, flags: absl_flags.FlagValues | None = None
) -> tuple[pathlib.Path, Any]:
  """Returns the checkpoint that a command line names, and its locked config.

  Args:
    argv: the arguments without the program's and the command's name.
    flags: the command's own flags, which get their values. If they include
      --sets, its value names the questions. If they include --out, an error is
      raised if the command must not write to the folder that --out names.

  Raises:
    Misconfigured: if flags, keys, values or rules have errors; the message has
      a line for each error.
  """
  flags = absl_flags.FlagValues() if flags is None else flags
  absl_flags.DEFINE_string('checkpoint', '', '', flag_values=flags)
  absl_flags.DEFINE_string('config', '', '', flag_values=flags)
  given = command_line.parse(
    flags, argv, required=('checkpoint',), overrides=True
  )
  errors, name = given.errors, flags.checkpoint
  checkpoint, reason = pathlib.Path(name), 'missing'
  if name:
    try:
      checkpoint = bucket_files.opened(name)
      reason = _problem(checkpoint)
    except buckets.BucketError as error:
      reason = str(error)
    errors += [f'--checkpoint={name}: {reason}'] if reason else []
  config: Any = None
  try:
    # Even without a valid checkpoint, the rest of the command line is checked,
    # so that the user sees all errors at once.
    config = _read(None if reason else checkpoint, flags.config)
    errors += overrides_lib.override_all(config, given.overrides)
    errors += [f'config.{x}' for x in external.adapter_options(config)]
    if 'sets' in flags:
      _choose_sets(config, flags.sets)
    errors += [f'config.{line}' for line in schema.check(config)]
  except (OSError, ValueError, exits.Misconfigured) as error:
    errors.append(str(error))
  if 'out' in flags and flags.out and not errors:
    folders = configuration.folders_read(config)
    errors += run_folder.problems(
      flags.out,
      flag='--out',
      command='evaluate',
      reads=folders | {'--checkpoint': checkpoint},
      may_lie_inside=True,
    )
  command_line.refuse(errors)
  return checkpoint, config.lock()


def _problem(folder: pathlib.Path) -> str:
  """Returns the reason why a folder is no checkpoint, or ''."""
  if not folder.is_dir():
    return 'no such folder'
  owner = run_folder.command_of(folder)
  if owner in ('prefer', 'sft'):
    return f'a run of {owner}: its policy is in {folder / "policy"}'
  has_model = any(folder.glob('*.safetensors'))
  if owner != 'train' and not (folder / 'config.json').is_file():
    return 'neither a run of train nor a Hugging Face directory'
  if owner != 'train' and not has_model:
    return 'has no *.safetensors, and is no run of train'
  return ''


def _read(checkpoint: pathlib.Path | None, file: str) -> Any:
  """Returns the config with which a checkpoint is evaluated.

  Without `file`, a run is evaluated with its recorded config, and other weights
  are evaluated with the base config.

  Args:
    checkpoint: the folder of the run or of the weights; None if the command
      line names no valid checkpoint.
    file: the value of --config, which names the config to return; '' if the
      flag was not given.

  Raises:
    ValueError, Misconfigured: if the config cannot be read; the message is one
      line.
  """
  is_run = checkpoint and run_folder.command_of(checkpoint) == 'train'
  if file:
    config = config_file.load(file)
  elif checkpoint and is_run:
    try:
      config = recorded_config.read(checkpoint)
    except ValueError as error:
      raise ValueError(f'--checkpoint={checkpoint}: {error}') from error
    # An evaluation sends nothing to trackers, so their packages are not needed.
    config.writer.trackers = ()
  else:
    config = base.get_config()
  if checkpoint and not is_run:
    config.model.path = str(checkpoint)
    # The weights of a directory are evaluated as they are, without adapters and
    # without a start from another policy.
    config.model.lora.rank, config.model.lora.path = 0, ''
    config.sft.before_training, config.init_from = False, ''
  return config


def _choose_sets(config: Any, sets: str) -> None:
  """Replaces the evaluation questions of a config by the questions of --sets.

  Args:
    config: the config to change.
    sets: the value of --sets: data sets, or files of questions, written as in
      `data.evaluation`; '' changes nothing.

  Raises:
    ValueError: if the value is wrong; the message is one line.
  """
  if not sets:
    return
  try:
    elements = mixtures.parse(sets)
  except ValueError as error:
    raise ValueError(f'--sets={sets}: {error}') from error
  data = config.data
  are_files = [_is_file(element.name) for element in elements]
  problem = ''
  if any(are_files) and not all(are_files):
    problem = 'must be data sets or files, not both'
  elif any(are_files) and any(element.split for element in elements):
    problem = 'a file has no splits'
  elif not any(are_files) and not data.root:
    problem = (
      f'does not end like a file ({", ".join(tables.SUFFIXES)}); for data '
      'sets, --config.data.root=DIR must name their folder'
    )
  if problem:
    raise ValueError(f'--sets={sets}: {problem}')
  data.name = 'tfds'
  if any(are_files):
    data.name = 'jsonl'
    places = [pathlib.Path.cwd()]
    if data.root:
      places.insert(0, buckets.local_folder(data.root).resolve())
    files = [_find('--sets', element.name, places) for element in elements]
    if data.corpus:
      files.append(_find('config.data.corpus', data.corpus, places))
    # All files that a config names must lie below data.root, and so must the
    # targets of symbolic links.
    data.root = os.path.commonpath(
      [path.parent for file in files for path in (file, file.resolve())]
    )
    names = [str(file.relative_to(data.root)) for file in files]
    data.corpus = names[-1] if data.corpus else ''
    sets = ','.join(
      text.replace(element.name, name, 1)
      for text, element, name in zip(sets.split(','), elements, names)
    )
  data.evaluation = sets
  # A valid config must name training questions, although nothing is trained.
  data.train = sets
  config.evaluate.num_questions = _ALL


def _is_file(name: str) -> bool:
  return pathlib.Path(name).suffix in (*tables.SUFFIXES, '.gz')


def _find(
  source: str, file: str, places: Sequence[pathlib.Path]
) -> pathlib.Path:
  """Returns the absolute path of a file in the first folder that has the file.

  Args:
    source: the flag or the key that names the file, for the message.
    file: the name of the file, relative to a folder.
    places: the folders in which the file is looked for.

  Raises:
    ValueError: if no folder has the file; the message is one line.
  """
  for place in places:
    path = pathlib.Path(os.path.abspath(place / file))
    if path.is_file():
      return path
  folders = ' or '.join(map(str, places))
  raise ValueError(f'{source}: {file}: no such file in {folders}')
