"""The flags of the lab's commands, and lines about what is wrong with them."""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import math
import pathlib
import typing

from stppo_jax.commands import configuration
from stppo_jax.commands import lab_algorithms


def split(
  argv: Sequence[str],
  needed: Sequence[str],
  optional: Sequence[str],
  *,
  lists: Sequence[str] = ('set',),
  switches: Sequence[str] = (),
) -> configuration.Flags:
  """The flags of a command on a batch.

  Args:
    argv: flags without the program's and the command's name.
    needed: names of flags that must be given; the row that `--config` names
      is as good as one given.
    optional: names of flags that may be given; 'config' is one.
    lists: names of flags that may be given several times.
    switches: names of flags without a value, beside `--float64`.

  Returns:
    All that is wrong is in `errors`, and `values` has '' for what is not
    given.
  """
  flags = configuration.split(
    argv,
    (*needed, *optional),
    lists=lists,
    switches=('float64', *switches),
  )
  values = dict.fromkeys((*needed, *optional), '') | flags.values
  for name in ('row', 'rows'):
    if name in needed and not values[name]:
      values[name] = lab_algorithms.row_of(values['config'])
  flags = dataclasses.replace(flags, values=values)
  errors = flags.errors + missing(flags, *needed)
  if 'out' in optional:
    errors += unwritable(values)
  return dataclasses.replace(flags, errors=errors)


def missing(flags: configuration.Flags, *names: str) -> list[str]:
  """A line for each flag that must be given and is not."""
  return [
    f'--{name}: missing'
    for name in names
    if not flags.values[name] and name not in flags.meant
  ]


def unwritable(values: Mapping[str, typing.Any]) -> list[str]:
  """Why `--out` cannot be there; before anything is computed for it."""
  out = values['out']
  path = pathlib.Path(out)
  if out and (path.is_dir() or not path.parent.is_dir()):
    return [f'--out={out}: a folder, or in a folder that does not exist']
  for name in ('batch', 'advantages'):
    read = values[name] if name in values else ''
    if out and read and path.resolve() == pathlib.Path(read).resolve():
      return [f'--out={out}: is the file of --{name}']
  return []


def number(flags: configuration.Flags, name: str) -> float | None:
  """The number of a flag; None where the flag is not given.

  Raises:
    ConfigurationError: it is not a finite one.
  """
  text = flags.values[name]
  if not text:
    return None
  try:
    found = float(text)
  except ValueError:
    found = math.nan
  if not math.isfinite(found):
    raise_if([f'--{name}={text}: must be a finite number'])
  return found


def raise_if(errors: Sequence[str]) -> None:
  """Raises ConfigurationError if there are any."""
  if errors:
    raise configuration.ConfigurationError(errors)


@contextlib.contextmanager
def naming(
  subject: str,
  kinds: tuple[type[Exception], ...] = (OSError, ValueError),
) -> Iterator[None]:
  """Turns what a file or a value raises into lines that name it."""
  try:
    yield
  except kinds as error:
    told = error.strerror if isinstance(error, OSError) else None
    lines = (told or str(error)).splitlines()
    raise configuration.ConfigurationError(
      [f'{subject}: {line}' for line in lines]
    ) from error
