"""Which rows and estimators the lab computes, with which options.

Their options are those of the table, or those that a configuration gives them
(`--config=FILE.py[:ROW]`), changed by settings KEY=VALUE. In a list of rows a
row has its settings behind it, and a comma within brackets is part of a value:

  st_ppo,st_ppo:correction.clipping_bias.tau=5:ratio.gradient=token
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import copy
import dataclasses
import functools
import operator
import re
import typing

from ml_collections import config_dict

from stppo_jax.commands import configuration
from stppo_jax.configs import algorithms

# A comma, unless a closing bracket comes before the next opening one.
_BETWEEN = re.compile(r',(?![^(\[]*[)\]])')
_CHOICES = re.compile(r'must be .* of ([\w, ]+)$')


@dataclasses.dataclass(frozen=True)
class Options:
  """A block of options that was asked for.

  Attributes:
    values: the options.
    key: of the block, as the maths names it in a complaint.
    typed: key of a setting, to (what was typed for it, its value's text).
    subject: what was typed for the block itself.
  """

  values: config_dict.ConfigDict
  key: str
  typed: Mapping[str, tuple[str, str]]
  subject: str

  def build(self, make: Callable[[typing.Any], typing.Any]) -> typing.Any:
    """`make(values)`; its complaints name what was typed.

    Raises:
      ConfigurationError: options that cannot be.
    """
    try:
      return make(self.values)
    except ValueError as error:
      raise configuration.ConfigurationError(
        [self._named(line) for line in str(error).splitlines()]
      ) from error

  def _named(self, line: str) -> str:
    for key, (typed, text) in self.typed.items():
      value = self._value(key)
      head = f'{self.key}.{key}={value!r}: '
      if line.startswith(head):
        rule = line.removeprefix(head)
        return f'{typed}: {rule}{_meant(text, rule)}'
    return f'{self.subject}: {line}'

  def _value(self, key: str):
    return functools.reduce(operator.getitem, key.split('.'), self.values)


def _meant(text: str, rule: str) -> str:
  """'; did you mean ...?' where the rule names choices near to the text."""
  found = _CHOICES.search(rule)
  if not found:
    return ''
  choices = found[1].split(', ')
  hints = (
    configuration.nearest(word, choices)
    for word in re.findall(r'\w+', text)
    if word not in choices
  )
  hint = next(filter(None, hints), '')
  return f'; {hint}' if hint else ''


def labels(text: str) -> list[str]:
  """The rows of a list, with their settings, each once."""
  return list(dict.fromkeys(_BETWEEN.split(text)))


def labelled(label: str, *, config: str) -> Options:
  """The row of a label: NAME[:KEY=VALUE]...

  Args:
    label: one of `labels`.
    config: as given, FILE.py[:ROW]; '' for the table.

  Raises:
    ConfigurationError: every error, one line each.
  """
  name, *settings = label.split(':')
  return row(
    name, settings, config=config, flag='--rows=', setting=f'--rows={name}:'
  )


def row(
  name: str,
  settings: Sequence[str],
  *,
  config: str,
  flag: str = '--row=',
  setting: str = '--set ',
) -> Options:
  """The options of a row.

  Args:
    name: of the row.
    settings: KEY=VALUE, the last one of equal keys counts.
    config: as given, FILE.py[:ROW]; '' for the table.
    flag: what stands before the name on the command line.
    setting: what stands before a setting.

  Raises:
    ConfigurationError: every error, one line each.
  """
  if config:
    whole = _whole(f'{file_of(config)}:{name}')
  elif name in algorithms.ALGORITHMS:
    block = copy.deepcopy(algorithms.ALGORITHMS[name])
    whole = config_dict.ConfigDict({'algorithm': block})
  else:
    choices = configuration.closest(name, list(algorithms.ALGORITHMS))
    raise configuration.ConfigurationError(
      [f'{flag}{name}: unknown row{choices}']
    )
  typed = _set_all(whole, 'algorithm', settings, setting)
  return Options(whole.algorithm, 'algorithm', typed, f'{flag}{name}')


def estimator(name: str, settings: Sequence[str], *, config: str) -> Options:
  """The options of an advantage estimator.

  Args:
    name: of the estimator; '' for that of the configuration.
    settings: KEY=VALUE.
    config: as given, FILE.py[:ROW]; '' for the defaults.

  Raises:
    ConfigurationError: every error, one line each.
  """
  table = algorithms.BLOCKS['advantage']
  subject = f'--estimator={name}' if name else f'--config={config}'
  if name and name not in table:
    choices = configuration.closest(name, list(table))
    raise configuration.ConfigurationError(
      [f'{subject}: unknown estimator{choices}']
    )
  if config:
    whole = _whole(config)
    its = whole.algorithm.advantage.name
    if name and name != its:
      raise configuration.ConfigurationError(
        [f'{subject}: the row of --config={config} has {its}']
      )
  else:
    block = algorithms.block('advantage', name)
    whole = config_dict.ConfigDict({'algorithm': {'advantage': block}})
  typed = _set_all(whole, 'algorithm.advantage', settings, '--set ')
  return Options(whole.algorithm.advantage, 'advantage', typed, subject)


def file_of(config: str) -> str:
  """FILE.py of FILE.py[:ROW]."""
  return config.partition(':')[0]


def row_of(config: str) -> str:
  """ROW of FILE.py[:ROW], '' where there is none."""
  return config.partition(':')[2]


def _whole(name: str) -> config_dict.ConfigDict:
  """The configuration, of which the block `algorithm` is read."""
  try:
    config = configuration.load(name)
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


def _set_all(
  config: config_dict.ConfigDict,
  block: str,
  settings: Sequence[str],
  flag: str,
) -> dict[str, tuple[str, str]]:
  """Changes the options of a block; what was typed, for `Options`."""
  texts, errors = {}, []
  for setting in settings:
    key, equals, text = setting.partition('=')
    if key and equals:
      texts[key] = text
    else:
      errors.append(f'{flag}{setting}: expected KEY=VALUE')
  errors += configuration.override_all(
    config, texts.items(), flag=flag, block=block
  )
  if errors:
    raise configuration.ConfigurationError(errors)
  return {key: (f'{flag}{key}={text}', text) for key, text in texts.items()}
