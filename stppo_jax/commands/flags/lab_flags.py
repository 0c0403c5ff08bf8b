"""Parses the flags of the lab, and the algorithms that they name.

The options of an algorithm or an estimator have the values of the configuration
in `--config=FILE.py[:ALGORITHM]` or, without --config, the defaults of the
table of algorithms. Settings KEY=VALUE then change some of the options. In a
list of algorithms, the settings of an algorithm follow its name, and a comma
within brackets is part of a value:

  st_ppo,st_ppo:correction.clipping_bias.tau=5:ratio.gradient=token
"""

from collections.abc import Mapping, Sequence
import copy
import pathlib
import re
from typing import Any, NamedTuple

from absl import flags as absl_flags
from ml_collections import config_dict

from stppo_jax import exits
from stppo_jax import settings as settings_lib
from stppo_jax.commands.flags import command_line
from stppo_jax.commands.flags import config_file
from stppo_jax.commands.flags import overrides as overrides_lib
from stppo_jax.configs import algorithms as algorithms_lib
from stppo_jax.configs import defaults
from stppo_jax.workdir import run_folder

# Matches a comma outside brackets. The next bracket behind such a comma, if
# any, is an opening bracket.
_BETWEEN = re.compile(r',(?![^(\[]*[)\]])')


class Options(NamedTuple):
  """The options of an algorithm or an estimator.

  Attributes:
    subject: the flag and value that name the algorithm or estimator, as the
      user typed them.
    values: the options, which are a section of a configuration.
    typed: a dict from each key that was changed to the setting that changed the
      key, as the user typed it.
  """

  subject: str
  values: Any
  typed: Mapping[str, str]


def of_batch(**options: Any) -> absl_flags.FlagValues:
  """Returns the flags of a command that reads a saved batch.

  Args:
    **options: the flags of this command alone, see `command_line.flags`.
  """
  return command_line.flags(batch='', **options, float64=False)


def parse(
  flags: absl_flags.FlagValues, argv: Sequence[str], *, required: str = ''
) -> None:
  """Sets the flags of a command that reads a saved batch.

  Args:
    flags: the flags, which get their values.
    argv: the arguments without the names of the commands.
    required: the name of the flag that must have a value, or '' for no such
      flag. If the flag is not given, it gets the ALGORITHM of `--config`.

  Raises:
    Misconfigured: if there are errors; the message has a line for each.
  """
  errors = command_line.parse(flags, argv, required=('batch',)).errors
  if required and not flags[required].value:
    # `--config` may be FILE.py:ALGORITHM,SIZE, of which only ALGORITHM counts.
    flags[required].value = flags.config.partition(':')[2].partition(',')[0]
    if not flags[required].value:
      errors.append(f'--{required}: missing')
  command_line.refuse(errors or out_problems(flags, {}))


def out_problems(
  flags: absl_flags.FlagValues, reads: Mapping[str, pathlib.Path]
) -> list[str]:
  """Returns the error lines of --out and --plot; [] if both are allowed.

  Commands call this function before any work.

  Args:
    flags: the flags of a command.
    reads: the folders that the command reads, see `run_folder.problems`.
  """
  values = flags.flag_values_dict()
  problems = []
  for name, kind in (('out', 'npz'), ('plot', 'png')):
    file = values.get(name)
    if not file:
      continue
    sources = (x for x in ('batch', 'advantages') if values.get(x))
    paths = {pathlib.Path(values[x]).resolve(): x for x in sources}
    # Resolved, since a link or another spelling may name the same file.
    if source := paths.get(pathlib.Path(file).resolve()):
      problems.append(f'--{name}={file}: must not be the file of --{source}')
    elif name == 'plot' and not file.endswith('.png'):
      problems.append(f'--plot={file}: must end in .png')
    else:
      problems += run_folder.file_problems(
        file, flag=f'--{name}', kind=kind, reads=reads
      )
  return problems


def algorithms(text: str, *, config: str) -> dict[str, Options]:
  """Returns a dict from each label NAME[:KEY=VALUE]... to its options.

  Args:
    text: the labels with commas between them; equal labels count once.
    config: the value FILE.py[:ALGORITHM] of --config; '' for the defaults of
      the table of algorithms.

  Raises:
    Misconfigured: if there are errors; the message has a line for each.
  """
  options, errors = {}, []
  for label in dict.fromkeys(_BETWEEN.split(text)):
    name, *settings = label.split(':')
    try:
      options[label] = algorithm(
        name, settings, config=config, flag='--algorithms'
      )
    except exits.Misconfigured as error:
      errors.append(str(error))
  command_line.refuse(errors)
  return options


def algorithm(
  name: str, settings: Sequence[str], *, config: str, flag: str = '--algorithm'
) -> Options:
  """Returns the options of an algorithm.

  Args:
    name: a key of the table of algorithms.
    settings: texts KEY=VALUE. If a key is repeated, its last value counts.
    config: the value FILE.py[:ALGORITHM] of --config; '' for the defaults of
      the table.
    flag: the flag that names the algorithm, for messages.

  Raises:
    Misconfigured: if there are errors; the message has a line for each.
  """
  subject = f'{flag}={name}'
  if config:
    run = _load(f'{config.partition(":")[0]}:{name}')
  elif name in algorithms_lib.ALGORITHMS:
    # A copy, because settings are applied in place and the table is shared.
    options = copy.deepcopy(algorithms_lib.ALGORITHMS[name])
    run: Any = config_dict.ConfigDict({'algorithm': options})
  else:
    choices = settings_lib.closest(name, list(algorithms_lib.ALGORITHMS))
    raise exits.Misconfigured(f'{subject}: unknown algorithm{choices}')
  start = '--set ' if flag == '--algorithm' else f'{subject}:'
  typed = _apply(run, 'algorithm', settings, start)
  return Options(subject, run.algorithm, typed)


def estimator(name: str, settings: Sequence[str], *, config: str) -> Options:
  """Returns the options of an advantage estimator.

  Args:
    name: the name of the estimator; '' for the estimator of the configuration.
    settings: texts KEY=VALUE. If a key is repeated, its last value counts.
    config: the value FILE.py[:ALGORITHM] of --config; '' for the estimator's
      defaults.

  Raises:
    Misconfigured: if there are errors; the message has a line for each.
  """
  table = defaults.DEFAULTS['advantage']
  subject = f'--estimator={name}' if name else f'--config={config}'
  if name and name not in table:
    choices = settings_lib.closest(name, list(table))
    raise exits.Misconfigured(f'{subject}: unknown estimator{choices}')
  if config:
    run = _load(config)
    configured = run.algorithm.advantage.name
    if name and name != configured:
      raise exits.Misconfigured(
        f'{subject}: must be {configured}, the estimator of --config={config}'
      )
  else:
    options = defaults.choice('advantage', name)
    run: Any = config_dict.ConfigDict({'algorithm': {'advantage': options}})
  typed = _apply(run, 'algorithm.advantage', settings, '--set ')
  return Options(subject, run.algorithm.advantage, typed)


def _load(name: str) -> Any:
  """Returns a configuration that has the section `algorithm`.

  Raises:
    Misconfigured: if the configuration cannot be loaded, or lacks the section.
  """
  config = config_file.load(name)
  try:
    _ = config.algorithm.advantage.name
  except AttributeError as error:
    raise exits.Misconfigured(
      f'--config={name}: has no algorithm.advantage.name'
    ) from error
  return config


def _apply(
  config: Any, section: str, settings: Sequence[str], flag: str
) -> dict[str, str]:
  """Changes options of a section.

  Returns:
    A dict from each changed key to its setting as the user typed it.

  Raises:
    Misconfigured: if there are errors; the message has a line for each.
  """
  pairs = [setting.partition('=') for setting in settings]
  errors = [
    f'{flag}{setting}: expected KEY=VALUE'
    for setting, (key, equals, _) in zip(settings, pairs)
    if not (key and equals)
  ]
  texts = {key: text for key, equals, text in pairs if key and equals}
  errors += overrides_lib.override_all(
    config, texts, flag=flag, section=section
  )
  command_line.refuse(errors)
  return {key: f'{flag}{key}={text}' for key, text in texts.items()}
