"""Nested settings: their dotted keys, rules for values, hints for names."""

from collections.abc import Callable, Sequence
import difflib
from typing import Any, NamedTuple


class Rule(NamedTuple):
  """A rule that a value must satisfy, and its description.

  Attributes:
    holds: function that returns whether a value satisfies the rule.
    allowed: the rule in words, to follow "must be".
  """

  holds: Callable[[Any], bool]
  allowed: str


def flatten(section: Any, prefix: str = '') -> dict[str, Any]:
  """Returns dotted key to value of all values in a section.

  Args:
    section: a mapping, or a ConfigDict (which is not a `Mapping`); some of its
      values may be such sections again.
    prefix: precedes every key.
  """
  flat = {}
  for key, value in section.items():
    if hasattr(value, 'items'):
      flat |= flatten(value, f'{prefix}{key}.')
    else:
      flat[f'{prefix}{key}'] = value
  return flat


def closest(name: str, choices: Sequence[str]) -> str:
  """Returns '; did you mean ...? choices: ...', the end of an error line."""
  hint = nearest(name, choices)
  hint = f' {hint}' if hint else ''
  return f';{hint} choices: {", ".join(choices)}' if choices else ''


def nearest(name: str, choices: Sequence[str]) -> str:
  """Returns 'did you mean ...?', or '' where no choice is near."""
  near = difflib.get_close_matches(name, choices, n=2)
  return f'did you mean {" or ".join(near)}?' if near else ''
