"""Parses the command line of a command with absl's flags.

    flags = command_line.flags(out='', count=3)
    given = command_line.parse(flags, argv, required=('out',))
    command_line.refuse(given.errors)
    flags.count

The help of a flag is in the docstring of its command, which `--help` prints.
absl defines the flags and parses their values. Its own parser of a command line
would stop at the first error, so this module takes the words apart, and turns
each error into a line.
"""

from collections.abc import Callable, Collection, Sequence
import difflib
import functools
import sys
from typing import Any, NamedTuple

from absl import flags as absl_flags

from stppo_jax import exits
from stppo_jax import settings
from stppo_jax import streams

NO_RUNS = 'DIR: missing; give the folder of a run, or several'
_OVERRIDE = 'config.'


class Given(NamedTuple):
  """Holds what a command line has besides flags: words, overrides, errors.

  The values of the flags are in the `FlagValues`.

  Attributes:
    words: the arguments that are no flags.
    overrides: a dict from the KEY to the VALUE of each `--config.KEY=VALUE`.
      The value is True for `--config.KEY` and False for `--noconfig.KEY`.
    errors: one line for each argument that is wrong or missing.
  """

  words: list[str]
  overrides: dict[str, str | bool]
  errors: list[str]


Definition = Callable[..., Any]
# Maps the type of a default to the function of absl that defines a flag with
# such a default.
_DEFINITIONS: dict[type, Definition] = {
  str: absl_flags.DEFINE_string,
  type(None): absl_flags.DEFINE_string,
  bool: absl_flags.DEFINE_boolean,
  int: absl_flags.DEFINE_integer,
  float: absl_flags.DEFINE_float,
  list: absl_flags.DEFINE_list,
}
# The definition of a flag that may be given several times.
REPEATED = functools.partial(absl_flags.DEFINE_multi_string, default=[])


def flags(**options: Any) -> absl_flags.FlagValues:
  """Returns the flags of a command, which have no values yet.

  Args:
    **options: for each flag its default, or a definition that `integer`,
      `number` or `one_of` returns. The flag has the type of its default. With a
      list as default, the flag is a list of texts. With None as default, the
      flag is a text, and None if it is not given.
  """
  defined = absl_flags.FlagValues()
  for name, option in options.items():
    if not callable(option):
      option = functools.partial(_DEFINITIONS[type(option)], default=option)
    option(name, help='', flag_values=defined)
  return defined


def integer(default: int | None = None, **bounds: int) -> Definition:
  """Returns the definition of a flag for an integer.

  Args:
    default: the default of the flag; None for no default.
    **bounds: the bounds of the flag's value, `lower_bound` and `upper_bound`.
  """
  return functools.partial(absl_flags.DEFINE_integer, default=default, **bounds)


def number(default: float | None = None, **bounds: float) -> Definition:
  """Returns the definition of a flag for a float; see `integer`."""
  return functools.partial(absl_flags.DEFINE_float, default=default, **bounds)


def one_of(choices: Sequence[str], default: str | None = None) -> Definition:
  """Returns the definition of a flag whose value is one of several texts."""
  return functools.partial(
    absl_flags.DEFINE_enum, default=default, enum_values=list(choices)
  )


def refuse(errors: Sequence[str]) -> None:
  """Raises `Misconfigured` with the error lines, if there are any."""
  if errors:
    raise exits.Misconfigured('\n'.join(errors))


def lost(losses: Sequence[object]) -> int:
  """Prints a line for each input that was not read; returns the exit code.

  Args:
    losses: a message about each input that a command could not read.
  """
  for loss in losses:
    print(streams.one_line(str(loss)), file=sys.stderr)
  return exits.USAGE if losses else 0


def program(
  body: Callable[[Sequence[str]], int], argv: Sequence[str], doc: str | None
) -> int:
  """Runs a program that is no command of `stppo_jax`; returns its exit code.

  Args:
    body: the function that takes the arguments and returns the exit code. If it
      raises an error with an `exit_code`, the error is printed.
    argv: the arguments. If there are none, or if --help is among them, the help
      is printed.
    doc: the text of the help.
  """
  if not argv or {'-h', '--help'}.intersection(argv):
    print(doc)
    return 0 if argv else exits.USAGE
  try:
    return body(argv)
  except Exception as error:
    exit_code = getattr(error, 'exit_code', None)
    if exit_code is None:
      raise
    print(error, file=sys.stderr)
    return exit_code


def subcommand(
  command: str, argv: Sequence[str], subcommands: Collection[str]
) -> str:
  """Returns the subcommand that a command line begins with.

  Raises:
    Misconfigured: if the first word is not among `subcommands`.
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
  missing: str = '',
  overrides: bool = False,
) -> Given:
  """Sets flags from a command line; returns its words, overrides and errors.

  Args:
    flags: the flags of the command; they get the values. A flag with a wrong
      value keeps its default.
    argv: the arguments without the program's and the command's name. The form
      `--flag value` means `--flag=value`. If a flag is repeated, its last value
      counts.
    required: the names of the flags that must be given, and not be empty.
    words: the largest number of arguments that are no flags.
    missing: the error if every argument is a flag; '' if this is no error.
    overrides: whether `--config.KEY=VALUE` is accepted.
  """
  choices = [f'--{name}' for name in flags]
  choices += ['--config.KEY'] if overrides else []
  choices = choices or ['--help']
  # absl refuses to read flags that are not marked as parsed.
  flags.mark_as_parsed()
  rest, errors = list(argv), []
  given = Given([], {}, errors)
  # The flags that were misspelt or have a wrong value. They are not reported
  # again as missing.
  meant: list[str] = []
  # absl would stop at the first wrong word. Here absl parses each value by
  # itself, so that the user sees all wrong words at once.
  while rest:
    word = rest.pop(0)
    name, equals, value = word.lstrip('-').partition('=')
    key = name.removeprefix('no')
    # --noFLAG sets FLAG to False, if no flag has the name noFLAG itself. The
    # word --noFLAG=1 is an unknown flag.
    is_off = name not in flags and key != name and not equals
    is_off &= key.startswith(_OVERRIDE) or key in flags and flags[key].boolean
    key = key if is_off else name
    follows = bool(rest) and not rest[0].startswith('--')
    if not word.startswith('-'):
      if len(given.words) == words:
        errors.append(f'{word}: not a flag; flags start with --')
      else:
        given.words.append(word)
    elif key in flags:
      if flags[key].boolean and not equals:
        value = str(not is_off)
      elif not equals and rest:
        value = rest.pop(0)
      elif not equals:
        errors.append(f'{word}: has no value')
        meant.append(f'--{key}')
        continue
      if problem := _problem(flags[key], value):
        errors.append(f'--{key}={streams.one_line(value)}: {problem}')
        meant.append(f'--{key}')
    elif overrides and word.startswith('--') and key.startswith(_OVERRIDE):
      text: str | bool = value if equals else not is_off
      if follows and not equals and not is_off:
        text = rest.pop(0)
      given.overrides[key.removeprefix(_OVERRIDE)] = text
    else:
      hint = settings.closest(f'--{name}', choices)
      errors.append(f'{word}: unknown flag{hint}')
      meant += difflib.get_close_matches(f'--{name}', choices)
      if not words and follows and not equals and rest[0][:1] != '-':
        rest.pop(0)  # skips the value of the unknown flag
  if missing and not given.words:
    errors.append(missing)
  errors += [
    f'--{name}: missing'
    for name in required
    if flags[name].value in (None, '') and f'--{name}' not in meant
  ]
  return given


def _problem(flag: absl_flags.Flag, text: str) -> str:
  """Sets a flag from a text; returns the rule that the text breaks, or ''."""
  parser = flag.parser
  try:
    flag.parse(text)
    # nan passes all bounds of absl, since no comparison with nan is true.
    is_number = flag.value == flag.value
    return '' if is_number else 'must be a number'
  except absl_flags.IllegalFlagValueError:
    near = ''
    if isinstance(parser, absl_flags.EnumParser):
      near = settings.nearest(text, parser.enum_values)
    return f'must be {rule(flag)}' + (f'; {near}' if near else '')


def rule(flag: absl_flags.Flag) -> str:
  """Returns the rule of a flag's values, as words that follow "must be"."""
  if isinstance(flag.parser, absl_flags.EnumParser):
    return f'one of {", ".join(filter(None, flag.parser.enum_values))}'
  words = flag.parser.syntactic_help or 'true or false'
  # If the flag has only one bound, absl writes 'number' in place of 'a number'.
  articles = {'number': 'a number', 'integer': 'an integer'}
  kind, _, rest = words.partition(' ')
  return f'{articles.get(kind, kind)} {rest}'.rstrip()
