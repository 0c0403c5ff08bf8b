"""Nested settings: dotted keys, rules for values, hints for misspelt names."""

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
  """Maps the dotted key of every value in a section to the value.

  Args:
    section: a mapping, or a ConfigDict (which is not a `Mapping`). Its values
      may be sections themselves.
    prefix: a text that precedes every key.
  """
  flat = {}
  for key, value in section.items():
    if hasattr(value, 'items'):
      flat |= flatten(value, f'{prefix}{key}.')
    else:
      flat[f'{prefix}{key}'] = value
  return flat


def closest(name: str, choices: Sequence[str]) -> str:
  """Returns the end of an error line: '; did you mean ...? choices: ...'."""
  hint = nearest(name, choices)
  hint = f' {hint}' if hint else ''
  return f';{hint} choices: {", ".join(choices)}' if choices else ''


def nearest(name: str, choices: Sequence[str]) -> str:
  """Returns 'did you mean ...?', or '' if no choice resembles the name."""
  near = difflib.get_close_matches(name, choices, n=2)
  return f'did you mean {" or ".join(near)}?' if near else ''
