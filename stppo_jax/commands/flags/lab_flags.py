"""The flags of the lab's commands and their error messages."""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import math
import pathlib
from typing import Any

from stppo_jax.commands.flags import configuration
from stppo_jax.commands.flags import lab_algorithms
from stppo_jax.workdir import run_folder

# Former to present names of flags; scripts may still use the former ones.
FORMER_NAMES: Mapping[str, str] = {'row': 'algorithm', 'rows': 'algorithms'}


def split(
  argv: Sequence[str],
  required: Sequence[str],
  optional: Sequence[str],
  *,
  lists: Sequence[str] = ('set',),
  switches: Sequence[str] = (),
) -> configuration.Flags:
  """Returns the flags of a command that reads a saved batch.

  Args:
    argv: flags without the program's and the command's name.
    required: names of flags that must be given; an algorithm may be named in
      `--config` instead of its flag.
    optional: names of flags that may be given; 'config' is one.
    lists: names of flags that may be given several times.
    switches: names of flags without a value, beside `--float64`.

  Returns:
    The flags; `values` has '' for each flag that is not given, `errors` has a
    line for each error.
  """
  flags = configuration.split(
    argv,
    (*required, *optional),
    lists=lists,
    switches=('float64', *switches),
    former_names=FORMER_NAMES,
  )
  values = dict.fromkeys((*required, *optional), '') | flags.values
  for name in ('algorithm', 'algorithms'):
    if name in required and not values[name]:
      values[name] = lab_algorithms.algorithm_of(values['config'])
  flags = dataclasses.replace(flags, values=values)
  errors = flags.errors + missing(flags, *required)
  if 'out' in optional:
    errors += output_errors(values)
  return dataclasses.replace(flags, errors=errors)


def missing(flags: configuration.Flags, *names: str) -> list[str]:
  """Returns a line for each of these flags that is not given."""
  return [
    f'--{name}: missing'
    for name in names
    if not flags.values[name] and name not in flags.meant
  ]


def output_errors(
  values: Mapping[str, Any], reads: Mapping[str, pathlib.Path] | None = None
) -> list[str]:
  """Returns a line if `--out` must not be written; called before any work.

  Args:
    values: the flags of a command.
    reads: the folders that the command reads, see `run_folder.problems`.
  """
  out = values['out']
  if not out:
    return []
  path = pathlib.Path(out)
  for name in ('batch', 'advantages'):
    source = values[name] if name in values else ''
    if source and path.resolve() == pathlib.Path(source).resolve():
      return [f'--out={out}: is the file of --{name}']
  return run_folder.file_problems(out, flag='--out', reads=reads or {})


def number(flags: configuration.Flags, name: str) -> float | None:
  """Returns the number of a flag, None where the flag is not given.

  Raises:
    ConfigurationError: it is not a finite number.
  """
  text = flags.values[name]
  if not text:
    return None
  try:
    value = float(text)
  except ValueError:
    value = math.nan
  if not math.isfinite(value):
    raise_if([f'--{name}={text}: must be a finite number'])
  return value


def raise_if(errors: Sequence[str]) -> None:
  """Raises a ConfigurationError if there are any errors."""
  if errors:
    raise configuration.ConfigurationError(errors)


@contextlib.contextmanager
def errors_name(
  subject: str,
  kinds: tuple[type[Exception], ...] = (OSError, ValueError),
) -> Iterator[None]:
  """Turns exceptions of these kinds into error lines that name a subject.

  Raises:
    ConfigurationError: 'SUBJECT: LINE' for each line of the exception.
  """
  try:
    yield
  except kinds as error:
    reason = error.strerror if isinstance(error, OSError) else None
    lines = (reason or str(error)).splitlines()
    raise configuration.ConfigurationError(
      [f'{subject}: {line}' for line in lines]
    ) from error
