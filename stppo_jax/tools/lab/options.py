"""The options of an algorithm or an estimator that the lab computes."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
import re
from typing import Any
from typing import NamedTuple

import numpy as np

from stppo_jax import exits
from stppo_jax import settings

# The choices at the end of an error message such as 'must be one of a, b'.
_CHOICES = re.compile(r'must be .* of ([\w, ]+)$')


class Source(NamedTuple):
  """A saved batch, and how it is computed on.

  Attributes:
    batch: the file.
    advantages: a file of advantages that take the place of its own; '' for
      its own.
    is_double: whether to compute in double precision.
  """

  batch: str
  advantages: str
  is_double: bool

  @property
  def dtype(self) -> type[np.floating]:
    """The dtype of the computation."""
    return np.float64 if self.is_double else np.float32


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
      Misconfigured: options that `make` refuses with a ValueError.
    """
    try:
      return make(self.values)
    except ValueError as error:
      raise exits.Misconfigured(
        '\n'.join(map(self._as_typed, str(error).splitlines()))
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
    settings.nearest(name, choices)
    for name in re.findall(r'\w+', text)
    if name not in choices
  )
  hint = next(filter(None, hints), '')
  return f'; {hint}' if hint else ''
