"""The algorithms and estimators that a lab command names, with their options.

Their options are the defaults of the table of algorithms, or the values that a
configuration gives them (`--config=FILE.py[:ALGORITHM]`), changed by settings
KEY=VALUE. In a list of algorithms, the settings of an algorithm follow its
name, and a comma within brackets is part of a value:

  st_ppo,st_ppo:correction.clipping_bias.tau=5:ratio.gradient=token
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import copy
import dataclasses
import functools
import re
from typing import Any

from ml_collections import config_dict

from stppo_jax import settings as settings_lib
from stppo_jax.commands.flags import config_file
from stppo_jax.commands.flags import configuration
from stppo_jax.commands.flags import overrides as overrides_lib
from stppo_jax.configs import algorithms

# A comma, unless a closing bracket comes before the next opening one.
_BETWEEN = re.compile(r',(?![^(\[]*[)\]])')
# The choices at the end of an error message such as 'must be one of a, b'.
_CHOICES = re.compile(r'must be .* of ([\w, ]+)$')


@dataclasses.dataclass(frozen=True)
class Options:
  """The options of an algorithm or an estimator, and what the user typed.

  Attributes:
    values: the options, a section of a configuration.
    section: the name of that section in the error messages of `rl`.
    typed: key of each setting, to (flag and text as typed, text of the value).
    subject: the flag that names the algorithm or estimator, as typed.
  """

  values: Any
  section: str
  typed: Mapping[str, tuple[str, str]]
  subject: str

  def build(self, make: Callable[[Any], Any]) -> Any:
    """Returns `make(values)`; its errors name the flags as they were typed.

    Raises:
      ConfigurationError: options that `make` refuses with a ValueError.
    """
    try:
      return make(self.values)
    except ValueError as error:
      raise configuration.ConfigurationError(
        [self._as_typed(line) for line in str(error).splitlines()]
      ) from error

  def _as_typed(self, line: str) -> str:
    """Returns an error line with the typed flag in place of the key."""
    for key, (typed, text) in self.typed.items():
      value = functools.reduce(
        lambda section, name: section[name], key.split('.'), self.values
      )
      start = f'{self.section}.{key}={value!r}: '
      if line.startswith(start):
        rule = line.removeprefix(start)
        return f'{typed}: {rule}{_suggestion(text, rule)}'
    return f'{self.subject}: {line}'


def _suggestion(text: str, rule: str) -> str:
  """Returns '; did you mean ...?' if a choice of the rule is like the text."""
  match = _CHOICES.search(rule)
  if not match:
    return ''
  choices = match[1].split(', ')
  hints = (
    settings_lib.nearest(name, choices)
    for name in re.findall(r'\w+', text)
    if name not in choices
  )
  hint = next(filter(None, hints), '')
  return f'; {hint}' if hint else ''


def labels(text: str) -> list[str]:
  """Splits a list of algorithms with settings; drops repetitions."""
  return list(dict.fromkeys(_BETWEEN.split(text)))


def labelled(label: str, *, config: str) -> Options:
  """Returns the options of a label NAME[:KEY=VALUE]...

  Args:
    label: one of `labels`.
    config: FILE.py[:ALGORITHM] as given; '' = the defaults of the table.

  Raises:
    ConfigurationError: every error, one line each.
  """
  name, *settings = label.split(':')
  return algorithm(
    name,
    settings,
    config=config,
    flag='--algorithms=',
    setting_flag=f'--algorithms={name}:',
  )


def algorithm(
  name: str,
  settings: Sequence[str],
  *,
  config: str,
  flag: str = '--algorithm=',
  setting_flag: str = '--set ',
) -> Options:
  """Returns the options of an algorithm.

  Args:
    name: a key of the table of algorithms.
    settings: KEY=VALUE, of which the last of equal keys counts.
    config: FILE.py[:ALGORITHM] as given; '' = the defaults of the table.
    flag: the text before the name on the command line.
    setting_flag: the text before a setting on the command line.

  Raises:
    ConfigurationError: every error, one line each.
  """
  if config:
    run = _load(f'{file_of(config)}:{name}')
  elif name in algorithms.ALGORITHMS:
    options = copy.deepcopy(algorithms.ALGORITHMS[name])
    run = _section({'algorithm': options})
  else:
    choices = settings_lib.closest(name, list(algorithms.ALGORITHMS))
    raise configuration.ConfigurationError(
      [f'{flag}{name}: unknown algorithm{choices}']
    )
  typed = _apply(run, 'algorithm', settings, setting_flag)
  return Options(run.algorithm, 'algorithm', typed, f'{flag}{name}')


def estimator(name: str, settings: Sequence[str], *, config: str) -> Options:
  """Returns the options of an advantage estimator.

  Args:
    name: the name of the estimator; '' = that of the configuration.
    settings: KEY=VALUE, of which the last of equal keys counts.
    config: FILE.py[:ALGORITHM] as given; '' = the estimator's defaults.

  Raises:
    ConfigurationError: every error, one line each.
  """
  table = algorithms.DEFAULTS['advantage']
  subject = f'--estimator={name}' if name else f'--config={config}'
  if name and name not in table:
    choices = settings_lib.closest(name, list(table))
    raise configuration.ConfigurationError(
      [f'{subject}: unknown estimator{choices}']
    )
  if config:
    run = _load(config)
    configured = run.algorithm.advantage.name
    if name and name != configured:
      raise configuration.ConfigurationError(
        [f'{subject}: the algorithm of --config={config} has {configured}']
      )
  else:
    options = algorithms.choice('advantage', name)
    run = _section({'algorithm': {'advantage': options}})
  typed = _apply(run, 'algorithm.advantage', settings, '--set ')
  return Options(run.algorithm.advantage, 'advantage', typed, subject)


def file_of(config: str) -> str:
  """Returns FILE.py of FILE.py[:ALGORITHM]."""
  return config.partition(':')[0]


def algorithm_of(config: str) -> str:
  """Returns ALGORITHM of FILE.py[:ALGORITHM], '' where there is none."""
  return config.partition(':')[2]


def _section(values: Mapping[str, Any]) -> Any:
  return config_dict.ConfigDict(values)


def _load(name: str) -> Any:
  """Returns a configuration that has the section `algorithm`.

  Raises:
    ConfigurationError: it cannot be loaded, or lacks that section.
  """
  try:
    config = config_file.load(name)
  except ValueError as error:
    raise configuration.ConfigurationError(
      [f'--config={name}: {error}']
    ) from error
  try:
    _ = config.algorithm.advantage.name
  except AttributeError as error:
    raise configuration.ConfigurationError(
      [f'--config={name}: has no algorithm.advantage.name']
    ) from error
  return config


def _apply(
  config: Any,
  section: str,
  settings: Sequence[str],
  flag: str,
) -> dict[str, tuple[str, str]]:
  """Changes options of a section; returns `Options.typed`.

  Raises:
    ConfigurationError: every error, one line each.
  """
  texts, errors = {}, []
  for setting in settings:
    key, equals, text = setting.partition('=')
    if key and equals:
      texts[key] = text
    else:
      errors.append(f'{flag}{setting}: expected KEY=VALUE')
  errors += overrides_lib.override_all(
    config, texts.items(), flag=flag, section=section
  )
  if errors:
    raise configuration.ConfigurationError(errors)
  return {key: (f'{flag}{key}={text}', text) for key, text in texts.items()}
