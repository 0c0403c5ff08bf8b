"""Takes the command line of a command apart with absl's flags.

    flags = absl_flags.FlagValues()
    absl_flags.DEFINE_integer('shown', 10, '', lower_bound=0, flag_values=flags)
    given = command_line.parse(flags, argv, required=('out',))
    command_line.refuse(given.errors)
    flags.shown

The help of a flag is in the docstring of its command, which `--help` prints.
absl stops at the first error; here each one becomes a line.
"""

from collections.abc import Collection
from collections.abc import Sequence
import difflib
import math
from typing import NamedTuple

from absl import flags as absl_flags

from stppo_jax import exits
from stppo_jax import settings

_OVERRIDE = 'config.'


class Given(NamedTuple):
  """A command line; the values of its flags are in the `FlagValues`.

  Attributes:
    words: the arguments that are no flags.
    overrides: key to value of `--config.KEY=VALUE`; the value is True for
      `--config.KEY` and False for `--noconfig.KEY`.
    errors: one line for each argument that is wrong or missing.
  """

  words: list[str]
  overrides: dict[str, str | bool]
  errors: list[str]


def refuse(errors: Sequence[str]) -> None:
  """Raises `Misconfigured` with these lines, if there are any."""
  if errors:
    raise exits.Misconfigured('\n'.join(errors))


def subcommand(
  command: str, argv: Sequence[str], subcommands: Collection[str]
) -> str:
  """Returns the subcommand that a command line begins with.

  Raises:
    Misconfigured: it begins with none of `subcommands`.
  """
  name = argv[0] if argv else ''
  if name not in subcommands:
    problem = 'unknown command' if name else 'no command'
    choices = settings.closest(name, list(subcommands))
    line = f'{f"{command} {name}".strip()}: {problem}{choices}'
    raise exits.Misconfigured(line)
  return name


def parse(
  flags: absl_flags.FlagValues,
  argv: Sequence[str],
  *,
  required: Sequence[str] = (),
  words: int = 0,
  overrides: bool = False,
) -> Given:
  """Sets flags to what a command line says; `--flag value` is `--flag=value`.

  Args:
    flags: the flags of the command; they get the values. A flag with a wrong
      value keeps its default.
    argv: the arguments without the program's and the command's name. The last
      of equal flags counts.
    required: names of flags that must be given, and not be empty.
    words: the largest number of arguments that are no flags.
    overrides: whether `--config.KEY=VALUE` is known.
  """
  choices = [f'--{name}' for name in flags]
  choices += ['--config.KEY'] if overrides else []
  choices = choices or ['--help']
  rest, errors = _parse_known(flags, argv)
  given = Given([], {}, errors)
  meant: list[str] = []  # flags that were misspelt are not missing, too
  while rest:
    word = rest.pop(0)
    name, equals, value = word.lstrip('-').partition('=')
    key = name.removeprefix('no')
    is_off = name != key and key.startswith(_OVERRIDE) and not equals
    key = key if is_off else name
    follows = bool(rest) and not rest[0].startswith('--')
    if not word.startswith('-'):
      if len(given.words) == words:
        errors.append(f'{word}: not a flag; flags start with --')
      else:
        given.words.append(word)
    elif overrides and word.startswith('--') and key.startswith(_OVERRIDE):
      text: str | bool = value if equals else not is_off
      if follows and not equals and not is_off:
        text = rest.pop(0)
      given.overrides[key.removeprefix(_OVERRIDE)] = text
    else:
      hint = settings.closest(f'--{name}', choices)
      errors.append(f'{word}: unknown flag{hint}')
      meant += difflib.get_close_matches(f'--{name}', choices)
      if not words and follows and not equals and rest[0][0] != '-':
        rest.pop(0)  # the value of the unknown flag
  errors += [
    f'--{name}=nan: must be a number'
    for name, value in flags.flag_values_dict().items()
    if isinstance(value, float) and math.isnan(value)
  ]
  errors += [
    f'--{name}: missing'
    for name in required
    if flags[name].value in (None, '')
    and f'--{name}' not in meant
    and not any(line.startswith(f'--{name}=') for line in errors)
  ]
  return given


def _parse_known(
  flags: absl_flags.FlagValues, argv: Sequence[str]
) -> tuple[list[str], list[str]]:
  """Sets the known flags; returns all other arguments, and errors of values."""
  flags.set_gnu_getopt(True)
  argv, errors = list(argv), []
  while True:
    try:
      return flags(['', *argv], known_only=True)[1:], errors
    except absl_flags.Error as error:
      # absl names the flag in the message only: the first that it cannot parse.
      errors.append(_problem(flags, argv, str(error)))
      flags.unparse_flags()


def _problem(
  flags: absl_flags.FlagValues, argv: list[str], message: str
) -> str:
  """Removes the flag that a message of absl is about; returns our line."""
  for place, word in enumerate(argv):
    name, equals, text = word.lstrip('-').partition('=')
    if f'{message} '.startswith(f'Missing value for flag {word} '):
      del argv[place]
      return f'{word}: has no value'
    if not equals and place + 1 < len(argv):
      text = argv[place + 1]
    if name in flags and message.startswith(f'flag --{name}={text}: '):
      del argv[place : place + 1 + (not equals)]
      parser = flags[name].parser
      rule = parser.syntactic_help or 'true or false'
      if isinstance(parser, absl_flags.EnumParser):
        rule = f'one of {", ".join(filter(None, parser.enum_values))}'
        near = settings.nearest(text, parser.enum_values)
        rule += f'; {near}' if near else ''
      return f'--{name}={text}: must be {rule}'
  raise exits.Misconfigured(message)
